"""Reveal the orders of guilty operators at both shapes, and time isobit's operator in their place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from isobit.auditing.axes.axes import Variation
from isobit.auditing.judging.findings import GuiltyCall
from isobit.auditing.judging.remedies import price_of
from isobit.auditing.orders.call_target import target_of_rows, target_of_sum
from isobit.auditing.orders.probed_call import (
    CallTarget,
    Clock,
    FoundSum,
    Index,
    OutOfTimeError,
    ProbedCall,
    count_places,
)
from isobit.auditing.orders.sum_finder import SumFinder
from isobit.auditing.records import ORDER, Guilty
from isobit.auditing.replay.call import Call, TensorSpec, operator_name, rebuild
from isobit.errors import EngineError, RevealError, in_one_line
from isobit.foundation.machine import thread_count
from isobit.order.addition import find_difference
from isobit.reveal.certificate import OrderClass, OrderComparison, check_revealing
from isobit.reveal.target import Progress
from isobit.reveal.tree import Tree, reveal

# Choose the sum of a recorded call that is revealed: through which input, in which result, at which element.

Row = int | tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """How a sum was found, so that two calls are probed alike.

    Attributes:
        carrier: the flat position of the input that holds the terms.
        output: the index of the result.
        corner: 0 if the first element of a row is read, -1 if the last.
        rows: whether the sum is inside a function of rows.
        addend: the name of an input of which one entry is added to the sum.
        with_addend: whether that entry is one of the terms.
    """

    carrier: int
    output: int
    corner: int
    rows: bool = False
    addend: str = ""
    with_addend: bool = False


def make_target(call: ProbedCall, row: Row, way: Way | None) -> tuple[CallTarget, Way]:
    """Find a sum in the call and make a target of it.

    Args:
        call: the call.
        row: an index of the result's first dimension, or the whole index of an element.
        way: how the sum was found in the other call; None tries every input and result.

    Returns:
        The target, and how its sum was found.

    Raises:
        RevealError: There is no sum that can be probed.
    """
    if way is None or not way.rows:
        found = _find_sum(call, row, way)
        if found is not None:
            with_addend = way is not None and way.with_addend
            made = target_of_sum(call, found[0], with_addend=with_addend)
            return made, replace(found[1], with_addend=with_addend)
    outs = call.run()
    for carrier in (call.inputs if way is None else [way.carrier]) if outs else ():
        rows = target_of_rows(call, carrier, _element_of(row, tuple(outs[0].shape), 0))
        if rows is not None:
            return rows, Way(carrier, 0, 0, rows=True)
    raise RevealError(
        expected="a result that sums entries of an input",
        received=f"{call.name}, in which no element depends linearly on several of them, nor is made from the "
        "squares or the exponentials of a row",
        remedy="it has no order of addition that could be revealed",
    )


def _find_sum(call: ProbedCall, row: Row, way: Way | None) -> tuple[FoundSum, Way] | None:
    """Return the terms of an element; of its row's first or last element, whichever adds more."""
    shapes = [tuple(out.shape) for out in call.run()]
    for carrier, output in _carriers(call, shapes, way):
        best: tuple[FoundSum, Way] | None = None
        for corner in (0, -1) if way is None else (way.corner,):
            element = _element_of(row, shapes[output], corner)
            found = SumFinder(call, output, element).find(carrier)
            if found is not None and (best is None or found.n > best[0].n):
                best = found, Way(carrier, output, corner, addend=_addend_of(call, found))
            if isinstance(row, tuple) or (best is not None and best[0].whole):
                break
        if best is not None and best[0] is not found:  # the search for the other has set the inputs
            again = SumFinder(call, output, best[0].element).find(carrier)
            best = None if again is None else (again, best[1])
        if best is not None:
            return best
    return None


def _addend_of(call: ProbedCall, found: FoundSum) -> str:
    return "" if found.addend is None else call.name_of(found.addend.at) or "another input"


def _carriers(
    call: ProbedCall, shapes: list[tuple[int, ...]], way: Way | None
) -> Iterator[tuple[int, int]]:
    """Yield (input, result), the last input first: weights and values follow what they are multiplied with."""
    if way is not None:
        yield way.carrier, way.output
        return
    for output, shape in enumerate(shapes):
        if math.prod(shape):
            for carrier in reversed(call.inputs):
                yield carrier, output


def _element_of(row: Row, shape: tuple[int, ...], corner: int) -> Index:
    """Return the element that is read: as given, or the first or last one of a row."""
    if isinstance(row, tuple):
        given = (*row, *[0] * len(shape))[: len(shape)]
    else:
        given = (row, *(corner % size for size in shape[1:]))[: len(shape)]
    return tuple(min(at, size - 1) for at, size in zip(given, shape, strict=True))


# `reveal_both`: the order in which an operator adds in a recorded call and in its variant.


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


SECONDS = 20.0  # for one operator


def add_orders(
    guilty: Sequence[Guilty],
    findings: Sequence[GuiltyCall],
    variation: Variation,
    count: int,
    say: Callable[[str, int, int], None],
) -> tuple[Guilty, ...]:
    """Return the guilty operators, the first `count` kinds of them with their orders and the price of isobit's.

    Operators that were called with the same shapes share one picture.
    """
    by_call = {finding.place.call: finding for finding in findings}
    seen: dict[object, tuple[object, str, float | None]] = {}
    found = []
    for one in guilty:
        key = (one.place.operator, one.shapes, one.kind)
        if key not in seen and len(seen) < count and one.kind == ORDER:
            say("revealing orders", len(seen), count)
            seen[key] = look(by_call[one.place.call], variation)
        orders, words, price = seen.get(key, (None, "", None))
        found.append(replace(one, orders=orders, why_no_order=words, price=price))
    return tuple(found)


def look(finding: GuiltyCall, variation: Variation) -> tuple[object, str, float | None]:
    """Return the certificate of both orders, what it shows or why there is none, and the price of isobit's operator."""
    with _disable_current_modes(), torch.no_grad():
        run = rebuild(finding.func, finding.run, finding.spec)
        variant = rebuild(finding.func, finding.variant, finding.spec)
        certificate, words = reveal_both(
            run, variant, variation.sides, budget=SECONDS, threads=variation.threads
        )
        return certificate, words, price_of(filled(finding))


def filled(finding: GuiltyCall) -> Call:
    """Return a call of the run's shapes with random numbers, for timing."""
    flat = [
        torch.randn_like(v.empty())
        if isinstance(v, TensorSpec) and v.dtype.is_floating_point
        else v
        for v in finding.run
    ]
    return rebuild(finding.func, flat, finding.spec)
