"""Watch the audited run: call every operator again as the variant would, with the inputs it has just had.

[Note: judged on the variant's own inputs] Where a replay differs, its rows are put in the place of the run's own at
once. So every later operator has the inputs that it has in the variant, and whether it is guilty does not depend on
the operators before it: rounding that shows on one input may not show on another. If every operator was judged, the
watched run has the variant's results, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.auditing.judging.accuracy import explain, random_states
from isobit.auditing.judging.findings import (
    ByResult,
    Comparison,
    GuiltyCall,
    Reads,
    Totals,
    compare,
    merge,
)
from isobit.auditing.labels.labels import MIXED, Known, Ledger, Marks
from isobit.auditing.records import Place, Unjudged
from isobit.auditing.replay.call import (
    Call,
    describe,
    flatten,
    positions_of,
    results_of,
    tensors_of,
    unflatten,
    without_rows,
    written_by,
)
from isobit.auditing.replay.merging import MIXED_OURS, Parts, merge_parts
from isobit.auditing.replay.places import Places
from isobit.auditing.replay.replay import (
    Again,
    Key,
    Numbering,
    SameCall,
    computes,
    is_compared,
    is_exact,
)

# A running total over positions has in it what the variant's rows do not have: padding, or what an earlier call added.
# A model may cancel that later, as it does with the decays of linear attention: by itself it shows no error.
ALONG_ROWS = "adds along positions, also those that the variant's call does not have"


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Judge every call of a run. A subclass says how a call is made again."""

    def __init__(self, places: Places, axis: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbering, self.axis = Numbering(places), axis
        self.judged = self.exact = self.carriers = 0
        self.findings: list[GuiltyCall] = []
        self.unjudged: list[Unjudged] = []
        self.replays: dict[int, list[Again]] = {}
        self.seen: list[Key] = []  # the calls that compute
        self.changes, self.totals = Ledger(), Totals()
        # (call, result) of sums over samples, and whether isobit's tree merges them
        self.summed: dict[tuple[int, int], bool] = {}
        self.parts = Parts()  # of sums over samples
        self.read: set[Key] = set()  # those that are read again
        self.reads = Reads()  # of guilty calls' results
        self.explaining = 0.0  # seconds spent to tell order from error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, judge it, and follow its rows."""
        flat, spec = flatten(func, args, kwargs or {})
        place, key = self.numbering.next(func)
        self.reads.note(flat)
        odd = without_rows(flat)
        plans = None if odd else self.plan(func, flat, spec, key)
        out = func(*args, **(kwargs or {}))
        results = results_of(func, flat, spec, out)
        odd = odd or without_rows(results)
        if odd:
            self.give_up(
                place,
                f"it has {odd}, whose rows are not followed: a dense one there would be judged",
                results,
            )
            return out
        if plans is not None and any(r.is_complex() for r in results):
            plans = "it returns complex numbers, which are not compared"
        if not is_exact(func) and any(r.is_floating_point() for r in results):
            self.seen.append(key)
        marks = self.follow(func, flat, spec, results, key)
        if (
            plans is None
            or not computes(func, flat)
            or not any(is_compared(func, r) for r in results)
        ):
            self.exact += 1
            self.is_carrier(Judged(place, key, func, flat, spec, results, marks), False)
        else:
            self.judge(Judged(place, key, func, flat, spec, results, marks), plans)
        return out

    def plan(
        self, func: Any, flat: list[Any], spec: Any, key: Key
    ) -> list[tuple[Again, list[Any]]] | str | None:
        """Return the replays of a call with their arguments, why it is not judged, or None if it is exact."""
        raise NotImplementedError

    def follow(
        self, func: Any, flat: list[Any], spec: Any, results: list[Tensor], key: Key
    ) -> list[Known]:
        """Return the marks of the results."""
        raise NotImplementedError

    def judge(self, call: Judged, plans: list[tuple[Again, list[Any]]] | str) -> None:
        """Compare the results of a call with those of its replays."""
        reason = plans if isinstance(plans, str) else why_unknown(call)
        if reason or isinstance(plans, str):
            self.unjudged.append(Unjudged(call.place, self.axis, reason))
            return
        for again, _ in plans:
            again.results = [marks_to_write(call, at) for at in range(len(call.marks))]
        try:
            pairs = list(self.pairs(call, plans))
        except NotComparable as error:
            self.unjudged.append(Unjudged(call.place, self.axis, str(error)))
            self.lose(call)
            return
        if not any(pair.run.numel() for pair in pairs):
            self.exact += 1  # none of the sample's rows is in this call
            return
        self.judged += 1
        self.settle(call, pairs, plans)

    def give_up(self, place: Place, reason: str, results: Sequence[Tensor]) -> None:
        """Record a call without a verdict."""
        self.unjudged.append(Unjudged(place, self.axis, reason))

    def lose(self, call: Judged) -> None:
        """Forget what results are where they could not be compared: what is computed from them is not judged."""

    def settle(
        self, call: Judged, pairs: Sequence[Pair], plans: list[tuple[Again, list[Any]]]
    ) -> None:
        """Record a call as guilty if any pair differs."""
        compared: dict[int, Comparison] = {}
        differ: dict[int, GuiltyCall] = {}
        for pair in pairs:
            found = compare(pair.run, pair.variant)
            compared[pair.at] = merge(compared.get(pair.at), found)
            if found.elements and pair.at not in differ:
                differ[pair.at] = self.find(call, pair, found)
        carried = self.is_carrier(call, bool(differ))
        if not differ:
            self.carriers += carried
            return
        finding = differ[min(differ)]
        if finding.kind == "error" and self.adds_along_rows(call):
            self.judged -= 1
            self.give_up(call.place, ALONG_ROWS, call.results)
            return
        kinds = {at: (one.kind, one.accuracy) for at, one in differ.items()}
        self.reads.wait_for(ByResult(finding, compared, kinds), call.results)
        if self.is_total(call):
            self.totals.add(call.results, finding)
        else:
            self.findings.append(finding)
        self.replays[call.place.call] = [again for again, _ in plans]
        for pair in pairs:  # see [Note: judged on the variant's own inputs]
            if pair.again is None:
                call.results[pair.at].copy_(pair.variant)
            else:
                pair.again.substitute(pair.at, call.results[pair.at], pair.variant)

    def adds_along_rows(self, call: Judged) -> bool:
        """Return whether each row of a result is a sum over the rows before it, too."""
        return False

    def is_total(self, call: Judged) -> bool:
        """Return whether a call's result is one of all samples, which may never meet a sample's rows again."""
        return False

    def is_carrier(self, call: Judged, guilty: bool) -> bool:
        """Return whether a guilty operator before this call changed its inputs, and pass that on to its results."""
        inputs = [v for v in call.flat if isinstance(v, Tensor)]
        carried = any(self.changes.is_changed(v) for v in inputs)
        if carried or guilty:
            for result in call.results:
                self.changes.change(result)
        return carried

    def find(self, call: Judged, pair: Pair, found: Comparison) -> GuiltyCall:
        """Describe a difference and tell order from error."""
        began = time.perf_counter()
        form = call.spec if pair.again is None else pair.again.form(call.spec)
        variant = Call(call.func, *unflatten(call.func, pair.arguments, form))
        kind, accuracy = explain(variant, pair.run, pair.variant, pair.at, pair.parts)
        self.explaining += time.perf_counter() - began
        ours, theirs = describe(call.flat), describe(pair.arguments)
        return GuiltyCall(call.place, found, kind, accuracy, call.func, ours, theirs, call.spec)

    def pairs(self, call: Judged, plans: list[tuple[Again, list[Any]]]) -> Iterator[Pair]:
        """Yield the rows of the run and those of the replays, for every result that is compared."""
        sums: dict[int, list[Tensor]] = {}
        for again, made in plans:
            for at, other in enumerate(replay(call, again, made)):
                result = call.results[at] if at < len(call.results) else None
                if result is None or not is_compared(call.func, result):
                    continue
                if isinstance(call.marks[at], str):
                    if is_summed(call, at):  # a sum over samples, which is merged below
                        sums.setdefault(at, []).append(other)
                    continue
                here = again.of_result(at, result)
                if here.shape != other.shape or here.dtype != other.dtype:
                    raise NotComparable(
                        f"the variant's rows give {list(other.shape)} {other.dtype}, "
                        f"the run's rows are {list(here.shape)} {here.dtype}"
                    )
                yield Pair(at, here, other, made, again)
        for at, parts in sums.items():
            ours = self.summed[call.place.call, at] = call.marks[at] == MIXED_OURS
            if call.key in self.read or (ours and parts[0].dtype != call.results[at].dtype):
                self.parts.put(call.results[at], parts)
            whole = merge_parts(parts, ours, call.results[at].dtype)
            if whole.shape != call.results[at].shape:
                raise NotComparable(
                    f"its results for one sample have shape {list(whole.shape)}, "
                    f"for all of them {list(call.results[at].shape)}"
                )
            yield Pair(at, call.results[at], whole, call.flat, None, parts)


class SameWatcher(Watcher):  # type: ignore[no-untyped-call]
    """Judge calls on an axis that leaves their inputs alone: repeat and threads.

    Args:
        places: Where calls are.
        axis: The axis.
        around: A context in which calls are made again.
    """

    def __init__(
        self, places: Places, axis: str, around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__(places, axis)
        self.around = around

    def plan(
        self, func: Any, flat: list[Any], spec: Any, key: Key
    ) -> list[tuple[Again, list[Any]]] | str | None:
        """Copy the arguments that the call may write to."""
        if is_exact(func):
            return None
        again = SameCall(self.around)
        return [(again, again.arguments(func, flat, spec))]

    def follow(
        self, func: Any, flat: list[Any], spec: Any, results: list[Tensor], key: Key
    ) -> list[Known]:
        """Return no marks: every row is compared."""
        return [{} for _ in results]


@dataclass(frozen=True)
class Judged:
    """A call that is being judged."""

    place: Place
    key: Key
    func: Any
    flat: list[Any]
    spec: Any
    results: list[Tensor]
    marks: list[Known]


@dataclass(frozen=True)
class Pair:
    """A result of the run and of a replay: which result, both values, and the replay's arguments."""

    at: int
    run: Tensor
    variant: Tensor
    arguments: list[Any]
    again: Again | None  # None for a sum that was merged from several replays
    parts: Sequence[Tensor] = ()  # what it was merged from


class NotComparable(Exception):
    """A replay that gives nothing to compare with, and why."""


def replay(call: Judged, again: Again, made: list[Any]) -> list[Tensor]:
    """Make a call again."""
    try:
        return again.run(call.func, own_copies(call.func, made, again.form(call.spec)), call.spec)
    except Exception as error:  # an operator may raise anything for a shape it does not take
        raise NotComparable(
            f"it cannot be called with the variant's rows: {first_line(error)}"
        ) from error


def own_copies(func: Any, made: list[Any], spec: Any) -> list[Any]:
    """Return arguments with copies of what the call writes to: its inputs are needed later to explain a difference."""
    copied = list(made)
    for at in positions_of(written_by(func)[0], made, spec):
        if isinstance(copied[at], Tensor):
            copied[at] = copied[at].clone()
    return copied


def is_summed(call: Judged, at: int) -> bool:
    """Return whether a result is a sum over samples, which is judged in backward."""
    return call.place.backward and call.marks[at] in (MIXED, MIXED_OURS)


def marks_to_write(call: Judged, at: int) -> Marks | None:
    """Return the marks by which a result is cut and written; None if it is neither."""
    marks = call.marks[at]
    if not isinstance(marks, str):
        return marks
    return {} if is_summed(call, at) else None


def why_unknown(call: Judged) -> str:
    """Return why the results cannot be compared, "" if some can: those with rows, and sums over samples in backward.

    What is computed from a result without rows is not judged either, so that none of them is lost.
    """
    reason = ""
    for at, (marks, result) in enumerate(zip(call.marks, call.results, strict=True)):
        if not is_compared(call.func, result):
            continue
        if not isinstance(marks, str) or is_summed(call, at):
            return ""
        reason = marks
    return reason


def first_line(error: BaseException) -> str:
    """Return the first line of an error, cut short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


# Hooks on the modules of a model: see their calls, and put other results in the place of their own.


@dataclass
class Called:
    """A call of a module: its path, what it was called with, and what it returned.

    Attributes:
        path: the path of the module.
        module: the module.
        args: what it was called with.
        kwargs: what it was called with by name.
        out: what it returned.
        writes: whether it wrote to a tensor that it was called with.
        states: the states of all devices' random numbers before the call.
        draws: whether it drew random numbers.
    """

    path: str
    module: nn.Module
    args: Any
    kwargs: Any
    out: Any
    writes: bool = False
    states: Sequence[Tensor] = ()
    draws: bool = False

    def with_its_random_numbers(self, program: Callable[[], Any]) -> Any:
        """Run something with the random numbers that the call started with, and leave those of the run alone."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            if self.states:
                torch.set_rng_state(self.states[0])
                for device, state in enumerate(self.states[1:]):
                    torch.cuda.set_rng_state(state, device)
            return program()


class Hooks:
    """Replace results of modules while the context is open.

    Args:
        model: The model.
        paths: The modules that are seen.
        replace: Called with each call; returns another result, or None to leave it.
        outermost: Whether only calls that are not inside another one are seen.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Collection[str],
        replace: Callable[[Called], Any],
        outermost: bool = False,
    ) -> None:
        """Note which modules are seen."""
        self.replace, self.outermost = replace, outermost
        self.seen = [(path, model.get_submodule(path)) for path in paths]
        self.handles: list[Any] = []
        self.open: list[tuple[list[int], list[Tensor]]] = []

    def __enter__(self) -> Hooks:
        """Register the hooks."""
        for path, module in self.seen:
            self.handles.append(module.register_forward_pre_hook(self.before, with_kwargs=True))
            after = self.after(path)
            self.handles.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the versions of the inputs and the random numbers."""
        self.open.append((versions((args, kwargs)), random_states()))

    def after(self, path: str) -> Callable[..., Any]:
        """Return the hook of a path."""

        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            known, states = self.open.pop()
            if self.outermost and self.open:
                return None
            writes = versions((args, kwargs)) != known
            draws = not all(map(torch.equal, states, random_states()))
            return self.replace(Called(path, module, args, kwargs, out, writes, states, draws))

        return hook


def versions(values: Any) -> list[int]:
    """Return the versions of all tensors in a structure; an inference tensor has none."""
    return [0 if t.is_inference() else t._version for t in tensors_of(values)]


def count_calls(model: nn.Module, run: Callable[[], Any]) -> tuple[dict[str, int], int]:
    """Run a model; return the number of the last call of each module that is called, children first, and of all calls.

    No hook is used, since a module that is not called may not allow one: its weight may be read by another module.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    numbers: dict[str, int] = {}
    total = 0
    called = nn.Module.__call__

    def count(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        out = called(module, *args, **kwargs)
        path = paths.get(id(module))
        if path is not None:
            numbers[path] = total
            total += 1
        return out

    nn.Module.__call__ = count  # type: ignore[method-assign]
    try:
        run()
    finally:
        nn.Module.__call__ = called  # type: ignore[method-assign]
    return numbers, total
