"""Record what data loaders yield, and check that workers and epochs give different data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torch.utils.data import dataloader as loaders

from isobit import bits
from isobit.guards.trial_run.report import Found, NotJudged
from isobit.guards.trial_run.saved_files import readable_tensors

MOST_BATCHES = 64  # of an epoch whose digests are kept
LARGEST = 2**24  # elements of a batch whose digest is taken


@dataclass
class Epoch:
    """One pass over a loader.

    Attributes:
        number: Which pass of this loader, from 0.
        set_to: The epoch of its DistributedSampler.
        batches: Digests of its first batches.
    """

    number: int
    set_to: int | None
    batches: list[tuple[str, ...]] = field(default_factory=list)


class Loaders:
    """Passes over data loaders, recorded while `recording` is open.

    Args:
        is_mine: Whether the current thread is the program's.
    """

    def __init__(self, is_mine: Callable[[], bool]) -> None:
        self.is_mine = is_mine
        self.epochs: dict[int, tuple[DataLoader[Any], list[Epoch]]] = {}
        self.passes: dict[int, tuple[Any, Epoch]] = {}  # by iterator, which is kept alive
        self.taken: list[dict[int, int]] = [{}]  # per step, the batches taken from each iterator

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace the loader's `__iter__` and its iterators' `__next__` by ones that also record."""
        start: Any = DataLoader.__iter__
        following: Any = loaders._BaseDataLoaderIter.__next__
        record = self

        def begin(self: DataLoader[Any]) -> Any:
            iterator = start(self)
            if record.is_mine():
                record.note_start(self, iterator)
            return iterator

        def take(self: Any) -> Any:
            batch = following(self)
            if record.is_mine() and id(self) in record.passes:
                record.note_batch(record.passes[id(self)][1], batch)
                taken = record.taken[-1]
                taken[id(self)] = taken.get(id(self), 0) + 1
            return batch

        DataLoader.__iter__ = begin  # type: ignore[method-assign]
        loaders._BaseDataLoaderIter.__next__ = take  # type: ignore[method-assign]
        try:
            yield
        finally:
            DataLoader.__iter__ = start  # type: ignore[method-assign]
            loaders._BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]
            self.passes = {}

    def note_step(self) -> None:
        """Begin to count the batches of the next step."""
        self.taken.append({})

    def note_start(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Begin an epoch of a loader."""
        _, passed = self.epochs.setdefault(id(loader), (loader, []))
        sampler = sampler_of(loader)
        epoch = Epoch(
            len(passed), sampler.epoch if isinstance(sampler, DistributedSampler) else None
        )
        passed.append(epoch)
        self.passes[id(iterator)] = iterator, epoch

    def note_batch(self, epoch: Epoch, batch: Any) -> None:
        """Keep the digests of a batch."""
        tensors = list(readable_tensors(batch))
        if len(epoch.batches) < MOST_BATCHES and sum(t.numel() for t in tensors) <= LARGEST:
            epoch.batches.append(tuple(bits.digest(t.detach().cpu()) for t in tensors))


def workers_yield_different_data(seen: Loaders) -> Iterator[Found]:
    """Yield a finding for batches of two workers, in one epoch, that have the same bits.

    Raises:
        NotJudged: If no loader with workers has yielded two batches.
    """
    judged = 0
    for loader, epochs in seen.epochs.values():
        workers = loader.num_workers
        for epoch in epochs:
            if workers < 2 or len(epoch.batches) < 2:
                continue
            judged += 1
            first: dict[tuple[str, ...], int] = {}
            for at, batch in enumerate(epoch.batches):
                other = first.setdefault(batch, at)
                if batch and other % workers != at % workers:
                    yield (
                        "workers-alike",
                        "error",
                        f"batches {other} and {at}, of workers {other % workers} and {at % workers}, have the same "
                        "bits: the workers share a seed, or an IterableDataset does not split its data by "
                        "torch.utils.data.get_worker_info()",
                    )
                    return
    if not judged:
        raise NotJudged("no DataLoader with two workers or more yielded two batches")


def epochs_differ(seen: Loaders) -> Iterator[Found]:
    """Yield a finding for a loader that shuffles and gives the same order in two epochs.

    Raises:
        NotJudged: If no loader that shuffles has begun two epochs.
    """
    shuffled = [(each, epochs) for each, epochs in seen.epochs.values() if shuffles(each)]
    judged = 0
    for loader, epochs in shuffled:
        for one, two in itertools.pairwise(epochs):
            shared = min(len(one.batches), len(two.batches))
            if not shared or not one.batches[0] or not has_order(loader):
                continue
            judged += 1
            if one.batches[:shared] == two.batches[:shared]:
                why = (
                    "; DistributedSampler.set_epoch() was not called between them"
                    if one.set_to is not None and one.set_to == two.set_to
                    else ""
                )
                yield (
                    "epochs-alike",
                    "error",
                    f"epochs {one.number} and {two.number} of a loader that shuffles begin with the same "
                    f"{shared} batches{why}",
                )
                return
    if not judged:
        raise NotJudged(why_not(shuffled))


def why_not(shuffled: list[tuple[DataLoader[Any], list[Epoch]]]) -> str:
    """Return why no two epochs could be compared."""
    if not shuffled:
        return "no DataLoader that shuffles was used"
    lengths = [len(loader) for loader, _ in shuffled if has_order(loader)]
    if not lengths:
        return "no DataLoader that shuffles has two samples"
    return f"one epoch was begun; it has {min(lengths)} batches: more --steps reach the next"


def has_order(loader: DataLoader[Any]) -> bool:
    """Return whether a loader has two samples or more to put in an order."""
    sampler = sampler_of(loader)
    return hasattr(sampler, "__len__") and len(sampler) > 1


def shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether a loader draws its samples in a random order."""
    sampler = sampler_of(loader)
    return isinstance(sampler, RandomSampler) or (
        isinstance(sampler, DistributedSampler) and sampler.shuffle
    )


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what draws the samples of a loader; Accelerate and others put it inside of batch samplers."""
    outer = loader.batch_sampler
    while getattr(outer, "batch_sampler", None) is not None:  # a shard of Accelerate's
        outer = outer.batch_sampler  # type: ignore[union-attr]
    return getattr(outer, "sampler", loader.sampler)
