"""`reveal_both`: the order in which an operator adds in a recorded call and in its variant."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from isobit.auditing.orders.found_sum import Index
from isobit.auditing.orders.probed_call import Clock, OutOfTimeError, ProbedCall
from isobit.auditing.orders.probed_places import count_places
from isobit.auditing.orders.sum_choice import Row, Way, make_target
from isobit.auditing.replay.call import Call, operator_name
from isobit.errors import EngineError, RevealError, in_one_line
from isobit.foundation.machine import thread_count
from isobit.order.addition import find_difference
from isobit.reveal.certificate import OrderClass, OrderComparison, check_revealing
from isobit.reveal.target import Progress
from isobit.reveal.tree import Tree, reveal


@dataclass(frozen=True)
class _Asked:
    """One of the two calls: its name, the row or the element that is read, and the number of threads."""

    name: str
    call: Call
    row: Row
    threads: int


@dataclass(frozen=True)
class _Revealed:
    tree: Tree
    way: Way
    element: Index
    unlike: Index | None  # an element of the same sample that is added in another order


_Pair = tuple[_Asked, _Asked]
_Found = tuple[_Revealed, _Revealed]


def reveal_both(
    run: Call,
    variant: Call,
    names: tuple[str, str],
    *,
    budget: float = 20.0,
    progress: Progress | None = None,
    rows: tuple[Row, Row] = (0, 0),
    threads: tuple[int, int] | None = None,
) -> tuple[OrderComparison | None, str]:
    """Reveal the order in which an operator adds, in a call of the audited run and in its variant.

    The operator itself is called, with fresh tensors that have the shapes, strides, dtypes, devices and alignment of
    the recorded ones, and with the recorded scalars. Recorded floating-point values are neither read nor changed;
    integers and booleans are copied, since they decide which elements are added.

    Args:
        run: the call in the audited run.
        variant: the same call in the variant.
        names: names of both, such as ("batch of 8", "alone").
        budget: seconds for both together.
        progress: called with (stage, done, total).
        rows: where the sample is in the results: an index of the first dimension, or the whole index of an element.
        threads: the number of torch's threads in each call; None leaves it as it is.

    Returns:
        A certificate of both configurations, and what it shows in words; or None, and the reason. The orders are those
        of one element; if it has the same order in both, but others of its row have another, one of those is chosen.

    Example:
        >>> import torch
        >>> from isobit.auditing.replay.call import Call
        >>> x, weight = torch.empty(4, 24), torch.empty(24, 8)
        >>> calls = [Call(torch.ops.aten.mm.default, (part, weight), {}) for part in (x, x[:1])]
        >>> found, text = reveal_both(*calls, ("batch of 4", "alone"))
        >>> found.count, found.classes[0].tree.n
        (2, 24)
    """
    clock = Clock(budget)
    counts = threads or (torch.get_num_threads(),) * 2
    asked = (
        _Asked(names[0], run, rows[0], counts[0]),
        _Asked(names[1], variant, rows[1], counts[1]),
    )

    def watch(stage: str, done: int, total: int) -> None:
        clock.stage = f"for {stage} ({done} of {total})"
        clock.check()
        if progress is not None:
            progress(stage, done, total)

    with torch.no_grad(), _disable_current_modes(), torch._C._DisableAutocast():
        try:
            _check_once()
            return _reveal_asked(asked, clock, watch)
        except OutOfTimeError as error:
            return None, f"{operator_name(run.func)} was not revealed within {budget:g} s: {error}"
        except (RevealError, EngineError) as error:
            return None, in_one_line(error)


@functools.cache
def _check_once() -> None:
    """Check that revealing works on this machine, once per process."""
    check_revealing()


def _reveal_asked(asked: _Pair, clock: Clock, progress: Progress) -> tuple[OrderComparison, str]:
    """Reveal both calls; where they add alike, look at other elements of the row, and at what is added to the sum."""
    first = _reveal_pair(asked, None, clock, progress)
    way, left_out = first[0].way, ""
    others: list[tuple[_Pair, Way]] = [
        (_move(asked, first, part.unlike), way) for part in first if part.unlike is not None
    ]
    if way.addend:
        others.append((asked, replace(way, with_addend=True)))
    for moved, another in others:
        if _differ(first):
            break
        try:
            found = _reveal_pair(moved, another, clock, progress)
        except (OutOfTimeError, RevealError):
            if another.with_addend:
                left_out = way.addend
            continue
        if _differ(found):
            first = found
    certificate = _certify(asked, first)
    return certificate, _explain(asked, first, certificate, left_out)


def _move(asked: _Pair, found: _Found, element: Index) -> _Pair:
    """Ask for another element of the same rows."""
    left, right = (
        replace(one, row=(part.element[0], *element[1:]))
        for one, part in zip(asked, found, strict=True)
    )
    return left, right


def _differ(found: _Found) -> bool:
    return found[0].tree.digest != found[1].tree.digest


def _reveal_pair(asked: _Pair, way: Way | None, clock: Clock, progress: Progress) -> _Found:
    left = _reveal_one(asked[0], way, clock, progress)
    return left, _reveal_one(asked[1], way or left.way, clock, progress)


def _reveal_one(one: _Asked, way: Way | None, clock: Clock, progress: Progress) -> _Revealed:
    clock.stage = "to find the terms"
    try:
        with thread_count(one.threads):
            call = ProbedCall(one.call, clock)
            call.check_repeatable()
            made, way = make_target(call, one.row, way)
            n, places = made.target.n, count_places(made.axes)
            clock.expect(-(-n // places), f"a sum of {n} terms with {places} probes in a call")
            tree = reveal(made.target, progress=progress)
    except RevealError as error:
        raise RevealError(
            expected=error.expected, received=f"{error.received} ({one.name})", remedy=error.remedy
        ) from error
    unlike = made.unlike_element() if tree.unlike else None
    if not made.own:  # rows of other samples
        tree = replace(tree, unlike=0)
    return _Revealed(tree, way, made.element, unlike)


def _certify(asked: _Pair, found: _Found) -> OrderComparison:
    """Group the two by order and arithmetic of the element that was read."""
    groups: dict[str, tuple[Tree, list[str]]] = {}
    for one, part in zip(asked, found, strict=True):
        groups.setdefault(part.tree.digest, (part.tree, []))[1].append(one.name)
    classes: list[OrderClass] = []
    for tree, names in groups.values():
        parting = find_difference(classes[0].tree.branch, tree.branch) if classes else None
        classes.append(OrderClass(tuple(names), tree, parting))
    return OrderComparison(tuple(classes), ())


def _explain(asked: _Pair, found: _Found, certificate: OrderComparison, left_out: str) -> str:
    """Say what the certificate shows."""
    name = operator_name(asked[0].call.func)
    left, right = (part.tree for part in found)
    where = f"{name}, {left.scope or f'element {list(found[0].element)}'}"
    if left.n != right.n:
        return f"{where}: {asked[0].name} adds {left.n} terms, {asked[1].name} {right.n}"
    if left.order_digest != right.order_digest:
        parting = certificate.classes[1].parting
        differs = f"; first difference: {parting[0]}, and {parting[1]}" if parting else ""
        return f"{where}: two orders, {asked[0].name}: {left}; {asked[1].name}: {right}{differs}"
    if left.digest != right.digest:
        return (
            f"{where}: the same order ({left}), but other arithmetic: {asked[0].name}: {left.arithmetic}; "
            f"{asked[1].name}: {right.arithmetic}"
        )
    known = "and the same arithmetic " if left.arithmetic is not None else ""
    others = (
        f"; {left.unlike} other elements of the row add in another order" if left.unlike else ""
    )
    if found[0].way.addend:
        shown = "was not revealed" if left_out else "is the same in both, too"
        others += f"; where it adds {found[0].way.addend} {shown}"
    return (
        f"{where}: the same order {known}in both ({left}){others}. Bits that differ have another cause: a branch on "
        f"the values, another sum inside the operator, or what is done to the sum. {certificate.claim}"
    )
