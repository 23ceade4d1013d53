"""Call an operator again on the rows that one call of the variant has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.auditing.labels.labels import RENUMBERED, Marks, Rows, cut, select, write
from isobit.auditing.labels.moving import MOVES, RESHAPES, SORTS, sorted_dimension
from isobit.auditing.replay.call import (
    Call,
    TensorSpec,
    describe,
    flatten,
    operator_name,
    positions_of,
    results_of,
    unflatten,
    without_rows,
    written_by,
)
from isobit.auditing.replay.merging import ask_for_share, merge_parts
from isobit.auditing.replay.places import Places

# Which operators only move bits, and which results are compared.

_NAMES = """
clone copy copy_ _to_copy detach detach_ alias lift_fresh zeros
zeros_like ones ones_like full full_like empty empty_like empty_strided new_zeros
new_ones new_full new_empty new_empty_strided arange fill fill_ zero_ masked_fill
masked_fill_ where embedding tril triu nonzero scalar_tensor eye slice_scatter
select_scatter scatter scatter_ index_copy index_copy_ _local_scalar_dense set_ resize_ histc
constant_pad_nd slice_backward select_backward
"""
# Operators that draw whole numbers.
DRAWS = {
    f"aten::{name}" for name in ("multinomial", "randperm", "randint", "randint_like", "random_")
}
# Operators that only move bits or make tensors from sizes: none of them can add in another order.
EXACT = MOVES | RESHAPES | {f"aten::{name}" for name in _NAMES.split()}


def is_exact(func: Any) -> bool:
    """Return whether an operator only moves bits, so that it has no order."""
    if func.is_view:
        return True
    return operator_name(func) in EXACT and "reduce" not in func._schema.overload_name


def computes(func: Any, flat: list[Any]) -> bool:
    """Return whether an operator reads numbers that are rounded, draws some, or sorts (equal keys have no order).

    Torch's own other operators on whole numbers are exact.
    """
    if operator_name(func) in SORTS or torch.Tag.nondeterministic_seeded in func.tags:
        return True
    given = [v for v in flat if isinstance(v, Tensor)]
    rounded = any(v.is_floating_point() or v.is_complex() for v in given)
    return rounded or not operator_name(func).startswith("aten::")


def is_compared(func: Any, result: Tensor) -> bool:
    """Return whether a result is judged: numbers that are rounded, and choices that depend on them."""
    if result.is_floating_point() or result.is_complex():
        return result.numel() > 0
    return operator_name(func) in SORTS | DRAWS or not operator_name(func).startswith("aten::")


# Record a run of the variant: for every call its sizes and its scalar arguments.

NO_ROWS = "a tensor without rows"  # is kept of a sparse or nested tensor
SMALL = 1 << 20  # elements of integer tensors that are kept whole
Key = tuple[str, str, bool, int]  # module, operator, backward, number of the call among these


@dataclass(frozen=True)
class Entry:
    """One call of the variant. Tensors that say where rows are (integers, masks) are kept, others only described."""

    func: Any
    flat: list[Any]
    spec: Any
    results: list[tuple[int, ...]]
    rounds: bool  # whether it returns floating-point numbers


class Numbering:
    """Number the calls of a run, all of them and those of one operator in one module."""

    def __init__(self, places: Places) -> None:
        self.places, self.calls = places, 0
        self._counts: Counter[tuple[str, str, bool]] = Counter()

    def next(self, func: Any) -> tuple[Any, Key]:
        """Return the place of the call that is being dispatched, and its key."""
        place = self.places.find(operator_name(func), self.calls)
        self.calls += 1
        group = (place.module, place.operator, place.backward)
        number = self._counts[group]
        self._counts[group] += 1
        return place, (*group, number)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every call while it is active."""

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbering = Numbering(places)
        self.entries: dict[Key, Entry] = {}
        self.read: set[Key] = set()  # calls of the backward pass whose results are read by others
        self._made_by: dict[int, Key] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call and record it."""
        flat, spec = flatten(func, args, kwargs or {})
        known = [keep(v) for v in flat]
        out = func(*args, **(kwargs or {}))
        _, key = self.numbering.next(func)
        results = results_of(func, flat, spec, out)
        if key[2] and not without_rows([*flat, *results]):
            self.note_reads(func, key, flat, results)
        rounds = any(r.is_floating_point() for r in results)
        shapes = [] if without_rows(results) else [tuple(r.shape) for r in results]
        self.entries[key] = Entry(func, known, spec, shapes, rounds)
        return out

    def note_reads(self, func: Any, key: Key, flat: list[Any], results: list[Tensor]) -> None:
        """Note which calls made what is read here, as the gradients of a weight that is used twice are."""
        if func.is_view:
            return
        given = [v for v in flat if isinstance(v, Tensor)]
        made = [self._made_by.get(v.untyped_storage()._cdata) for v in given]
        self.read.update(one for one in made if one is not None)
        self._made_by.update((r.untyped_storage()._cdata, key) for r in results)


def keep(value: Any) -> Any:
    """Return a small integer tensor or a mask itself, the spec of any other tensor, and other values as they are."""
    if without_rows([value]):
        return NO_ROWS
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and value.numel() <= SMALL
        return value if whole or is_mask(value) else describe([value])[0]
    return value


def is_mask(value: Tensor) -> bool:
    """Return whether a tensor has the shape of an attention mask: [batch, heads or 1, queries, keys]."""
    return value.dim() == 4 and value.shape[1] == 1


class Again:
    """A way to make a call again, and to compare or replace its results.

    Attributes:
        results: the marks of the results; None for one that is neither compared nor replaced.
    """

    results: list[Marks | None]

    def arguments(self, func: Any, flat: list[Any], spec: Any) -> list[Any]:
        """Return the arguments of the replay."""
        raise NotImplementedError

    def run(self, func: Any, flat: list[Any], spec: Any) -> list[Tensor]:
        """Make the call; the random numbers of the run are left as they are."""
        return run_again(func, flat, spec)

    def form(self, spec: Any) -> Any:
        """Return how the arguments of the replay are put together, where those of the run are by `spec`."""
        return spec

    def of_result(self, at: int, result: Tensor) -> Tensor:
        """Return the rows of a result that the replay computes, too."""
        return result

    def substitute(self, at: int, result: Tensor, value: Tensor) -> None:
        """Write the replay's rows into a result of the run."""
        result.copy_(value)


class SameCall(Again):
    """The same call with the same inputs, in another context."""

    def __init__(self, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.around, self.results = around, []

    def arguments(self, func: Any, flat: list[Any], spec: Any) -> list[Any]:
        """Copy tensors that the call may write to."""
        made = list(flat)
        for at in positions_of(written_by(func)[0], flat, spec):
            if isinstance(made[at], Tensor):
                made[at] = made[at].clone()
        return made

    def run(self, func: Any, flat: list[Any], spec: Any) -> list[Tensor]:
        """Make the call in the context."""
        with self.around():
            return run_again(func, flat, spec)


class OfParts(Again):
    """A call on one sample's parts of sums over samples."""

    def __init__(self, parts: dict[int, Tensor]) -> None:
        """Make the call with these parts in the place of the sums, by position."""
        self.parts, self.results = parts, []

    def arguments(self, func: Any, flat: list[Any], spec: Any) -> list[Any]:
        """Put the parts in the place of the sums."""
        return [self.parts[at].clone() if at in self.parts else v for at, v in enumerate(flat)]


@dataclass
class Replay(Again):
    """How to call an operator of the audited run as the variant would.

    Attributes:
        known: the marks of its arguments, by position.
        results: the marks of its results.
        rows: the rows that the variant has.
        entry: the same call in the variant, if there is one.
        share: if not 0, isobit's operator computes its rows' share of a sum over so many samples.
        theirs: how the variant's arguments are put together, where it has others, as a sum over other dimensions.
        counted: where rows are sorted together with others', their positions before, in which the last result counts.
    """

    known: dict[int, Marks]
    results: list[Marks | None]
    rows: Rows
    entry: Entry | None
    share: int = 0
    counted: Tensor | None = None
    theirs: Any = None

    def form(self, spec: Any) -> Any:
        """Return the variant's form where it has other arguments than the run."""
        return spec if self.theirs is None else self.theirs

    def run(self, func: Any, flat: list[Any], spec: Any) -> list[Tensor]:
        """Make the call as the variant does."""
        return run_again(func, flat, self.form(spec))

    def arguments(self, func: Any, flat: list[Any], spec: Any) -> list[Any]:
        """Return the arguments for the rows of the variant, in memory of their own."""
        other = self.in_their_form(func, flat)
        if other is not None:
            return other
        theirs = self.their_arguments(func, flat)
        if operator_name(func) in SORTS - {"aten::msort"}:
            self.counted = self.sorted_rows(func, flat)
        made = [self.argument(at, value, theirs) for at, value in enumerate(flat)]
        if theirs is not None and operator_name(func).startswith("isobit::"):
            # The spans and blocks of isobit's operators are positions of rows, which only the variant knows.
            made = [
                other if isinstance(other, Tensor) and not other.is_floating_point() else value
                for value, other in zip(made, theirs, strict=True)
            ]
        renumber = RENUMBERED.get(operator_name(func).rstrip("_"))
        if renumber is not None:
            renumber(self.known, self.rows, flat, made)
        for at in positions_of(written_by(func)[0], flat, spec):
            if made[at] is flat[at] and isinstance(made[at], Tensor):
                made[at] = made[at].clone()  # what belongs to all rows is the run's own
        samples = len(self.rows.labels)
        return ask_for_share(func, made, self.share, samples) if self.share else made

    def in_their_form(self, func: Any, flat: list[Any]) -> list[Any] | None:
        """Return the variant's arguments with the run's rows, where it has others than tensors in another number."""
        entry = self.entry
        if entry is None or len(entry.flat) == len(flat) or entry.func is not func or self.share:
            return None
        ours = [at for at, v in enumerate(flat) if isinstance(v, Tensor)]
        their = [at for at, v in enumerate(entry.flat) if isinstance(v, (Tensor, TensorSpec))]
        made = list(entry.flat)
        if len(ours) != len(their) or operator_name(func).rstrip("_") in RENUMBERED:
            return None
        for at, there in zip(ours, their, strict=True):
            like = entry.flat[there]
            part = cut(flat[at], self.known.get(at, {}), self.rows, like.shape)
            if part.shape != like.shape:
                return None
            made[there] = settle(part, like if isinstance(like, TensorSpec) else None)
        self.theirs = entry.spec
        return made

    def sorted_rows(self, func: Any, flat: list[Any]) -> Tensor | None:
        """Return the positions of the rows along the dimension that is sorted, if it has labels."""
        labels = self.known.get(0, {}).get(sorted_dimension(func, flat))
        return None if labels is None else select(labels, self.rows, None)

    def their_arguments(self, func: Any, flat: list[Any]) -> list[Any] | None:
        """Return the variant's arguments, if its call is of the same form and has these rows.

        Where the two programs differ, as in a loop over experts, calls with the same number need not be the same.
        """
        entry = self.entry
        if entry is None or len(entry.flat) != len(flat):
            return None
        for at, value in enumerate(flat):
            other = entry.flat[at]
            if isinstance(value, Tensor) and isinstance(other, (Tensor, TensorSpec)):
                part = cut(value, self.known.get(at, {}), self.rows, other.shape)
                return entry.flat if part.shape == other.shape else None
        return entry.flat

    def argument(self, at: int, value: Any, theirs: list[Any] | None) -> Any:
        """Return one argument."""
        other = theirs[at] if theirs is not None else value
        if not isinstance(value, Tensor):
            # Sizes, flags and numbers are the variant's; so is a mask that only the variant has.
            return value if isinstance(other, TensorSpec) else other
        if other is None:
            return None
        shape = other.shape if isinstance(other, (Tensor, TensorSpec)) else None
        if at in self.known:
            part = cut(value, self.known[at], self.rows, shape)
            return settle(part, other if shape == part.shape else None)
        if isinstance(other, Tensor) and not value.is_floating_point():
            return other  # whole numbers that describe rows are the variant's
        return value

    def of_result(self, at: int, result: Tensor) -> Tensor:
        """Return the rows of a result of the audited run."""
        part = cut(result, self.results[at] or {}, self.rows, self.shape_of_result(at))
        if self.counted is None or at < len(self.results) - 1:
            return part
        return torch.searchsorted(self.counted.to(part.device), part.contiguous())

    def shape_of_result(self, at: int) -> tuple[int, ...] | None:
        """Return the shape of a result in the variant, if known."""
        if self.entry is None or at >= len(self.entry.results):
            return None
        return self.entry.results[at]

    def substitute(self, at: int, result: Tensor, value: Tensor) -> None:
        """Write the variant's rows into a result of the audited run."""
        if self.counted is not None and at == len(self.results) - 1:
            value = self.counted.to(value.device)[value]
        write(result, self.results[at] or {}, self.rows, value, self.shape_of_result(at))


def settle(part: Tensor, like: TensorSpec | Tensor | None) -> Tensor:
    """Return a part in memory of its own, with the variant's strides: a kernel may take another path for others."""
    if (
        0 in part.stride()
        and part.numel() > 1
        and any(
            stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape, strict=True)
        )
    ):
        return part  # expanded: a copy would have other strides than the variant's
    if isinstance(like, TensorSpec) and like.numel and has_no_overlap(like):
        return like.empty().copy_(part)
    return part.clone()


def has_no_overlap(spec: TensorSpec) -> bool:
    """Return whether no two elements of a tensor of this spec share memory; there may be gaps, as in a slice."""
    reach = 0  # of the dimensions so far
    for stride, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def may_draw(func: Any) -> bool:
    """Return whether an operator may draw random numbers: torch marks its own, others may without a mark."""
    marked = torch.Tag.nondeterministic_seeded in func.tags
    return marked or not operator_name(func).startswith(("aten::", "isobit::"))


@contextmanager
def same_random_numbers(func: Any) -> Any:
    """Leave the random numbers of the run as they are, where an operator may draw some."""
    if may_draw(func):
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    else:
        yield


def run_again(func: Any, flat: list[Any], spec: Any) -> list[Tensor]:
    """Call an operator without changing the random numbers of the run; return its tensors."""
    args, kwargs = unflatten(func, flat, spec)
    with same_random_numbers(func):
        return results_of(func, flat, spec, Call(func, args, kwargs).run())


# Run the audited run again with the variant's results put in the place of some operators' own.


class Substituter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replace the rows of the results of chosen calls by those of their replays."""

    def __init__(
        self,
        replays: dict[int, list[Again]],
        chosen: Collection[int],
        summed: Mapping[tuple[int, int], bool] | None = None,
    ) -> None:
        """Substitute calls.

        Args:
            replays: How each guilty call is made again.
            chosen: The numbers of the calls to substitute.
            summed: (call, result) of sums over samples, which are merged from one replay per sample, and whether by
                isobit's tree.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.replays, self.chosen, self.summed = replays, chosen, summed or {}
        self.calls = self.substituted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, and its replays if it is chosen."""
        call = self.calls
        self.calls += 1
        if call not in self.chosen:
            return func(*args, **(kwargs or {}))
        flat, spec = flatten(func, args, kwargs or {})
        made = [(replay, replay.arguments(func, flat, spec)) for replay in self.replays[call]]
        out = func(*args, **(kwargs or {}))
        results = results_of(func, flat, spec, out)
        sums: dict[int, list[Tensor]] = {}
        for again, arguments in made:
            for at, value in enumerate(again.run(func, arguments, spec)):
                if at >= len(results) or not is_compared(func, results[at]):
                    continue
                if again.results[at] is None:
                    continue
                if again.results[at] or not self.sums_of(call, at):
                    again.substitute(at, results[at], value)
                else:
                    sums.setdefault(at, []).append(value)
        for at, parts in sums.items():
            results[at].copy_(merge_parts(parts, self.summed[call, at], results[at].dtype))
        self.substituted += 1
        return out

    def sums_of(self, call: int, at: int) -> bool:
        """Return whether a result is a sum over samples."""
        return (call, at) in self.summed


# Keep the results of some calls of a run, and play them back in another run.
#
# [Note: played back] A call that does not repeat gives other bits each time it is made again, so that no replay has
# the variant's results. Two runs are kept instead: a first and a second one, with the results of the guilty calls.
# The first run with the guilty results of the second played back must be the second run, bit for bit: then nothing
# but the guilty calls made the two differ.

Kept = dict[
    int, tuple[str, list[Tensor]]
]  # by the number of the call: the operator and its results


class Keeper(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep copies of the results of chosen calls."""

    def __init__(self, chosen: Collection[int]) -> None:
        """Keep the results of these calls, by their numbers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen, self.calls = chosen, 0
        self.kept: Kept = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, and copy its results if it is chosen."""
        call = self.calls
        self.calls += 1
        out = func(*args, **(kwargs or {}))
        if call in self.chosen:
            flat, spec = flatten(func, args, kwargs or {})
            results = [r.clone() for r in results_of(func, flat, spec, out)]
            self.kept[call] = (operator_name(func), results)
        return out


class Player(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Put kept results in the place of the run's own."""

    def __init__(self, kept: Mapping[int, tuple[str, list[Tensor]]]) -> None:
        """Play these results back. A call that is another operator, or has other shapes, keeps its own."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.calls = kept, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, and replace its results if they were kept."""
        operator, values = self.kept.get(self.calls, ("", []))
        self.calls += 1
        out = func(*args, **(kwargs or {}))
        if operator == operator_name(func):
            flat, spec = flatten(func, args, kwargs or {})
            for result, value in zip(results_of(func, flat, spec, out), values, strict=False):
                if result.shape == value.shape:
                    result.copy_(value)
        return out
