"""A variation: an audited run, and the calls of the variant that compute the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.auditing.labels.labels import Ledger, Rows

if TYPE_CHECKING:
    from isobit.auditing.records import AxisReport
    from isobit.auditing.replay.places import Places
    from isobit.auditing.replay.watching import Watcher

SEED = 20_480


@dataclass(frozen=True)
class VariantCall:
    """One call of the variant: its rows, how to run it, and the tokens of its rows."""

    rows: Rows
    run: Callable[[], Any]
    tokens: Tensor | None = None


@dataclass(frozen=True)
class Variation:
    """What changes on one axis.

    Attributes:
        axis: its name.
        sentence: what changes, in words.
        sides: short names of the audited run and of the variant.
        run: the audited run.
        calls: the calls of the variant, in order.
        inputs: input tensors of the audited run with the dimension and the labels of their rows.
        mixes: whether a sum over labelled rows is a sum over samples.
        joined: the dimension along which the rows of the calls are joined.
        around: a context in which every call is made again with its own inputs; the variant then has the same rows.
        accumulates: whether the variant adds gradients over its calls itself, so that the last call has them all.
        threads: the numbers of threads of the audited run and of the variant, where they are what changes.
        seed: where the variant's random numbers start.
        by_chance: whether a call made again may differ each time; see [Note: played back] in playing.py.
        watcher: makes the watcher of the audited run, where an axis has its own.
        merge: adds the gradients of the variant's calls, where that is not done one after another.
        after: adds to the report what an axis finds beside the operators of the run.
    """

    axis: str
    sentence: str
    sides: tuple[str, str]
    run: Callable[[], Any]
    calls: tuple[VariantCall, ...]
    inputs: tuple[tuple[Tensor, int, Tensor], ...] = ()
    mixes: bool = False
    joined: int = 0
    around: Callable[[], AbstractContextManager[Any]] | None = None
    accumulates: bool = False
    threads: tuple[int, int] | None = None
    seed: int = SEED
    by_chance: bool = False
    watcher: Callable[[Places], Watcher] | None = None
    merge: Callable[[Sequence[Tensor]], Tensor] | None = None
    after: Callable[[AxisReport], AxisReport] | None = None

    def ledger(self) -> Ledger:
        """Return a ledger in which the inputs are labelled."""
        ledger = Ledger()
        marks: dict[int, dict[int, Any]] = {}
        for tensor, dim, labels in self.inputs:
            marks.setdefault(id(tensor), {})[dim] = ledger.vector(labels)
            ledger.put(tensor, marks[id(tensor)])
        return ledger


@contextmanager
def same_start(seed: int = SEED) -> Iterator[None]:
    """Start a run with the same random numbers as every other run of an audit."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
