"""Call an operator again on the rows that one call of the variant has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.labels.labels import Marks, Rows, cut, select, write
from isobit.auditing.labels.moving import SORTS, sorted_dimension
from isobit.auditing.labels.renumbering import RENUMBERED
from isobit.auditing.replay.call import (
    Call,
    TensorSpec,
    operator_name,
    positions_of,
    results_of,
    unflatten,
    written_by,
)
from isobit.auditing.replay.merging import ask_for_share
from isobit.auditing.replay.recording import Entry


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
