"""`check_loader`: whether workers of a DataLoader repeat each other, and whether every item reaches its batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from isobit import bits
from isobit.errors import ArgumentError
from isobit.guards.live.events import Event
from isobit.guards.live.module_replay import tensors_in

MOST_ITEMS = 32  # that are replaced one by one


def check_loader(loader: DataLoader[Any]) -> list[Event]:
    """Read two batches per worker, and collate a batch with one item replaced by another.

    Args:
        loader: A DataLoader. Reading it draws from the generators of its sampler and its dataset, so pass one that is
            made for this.

    Returns:
        Findings. `workers-alike`: two workers return the same numbers, which differ from batch to batch: random numbers
        whose seed the workers share. `item-lost`: a batch has the same bits if one of its items is another.

    Raises:
        ArgumentError: If it is no DataLoader.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from isobit.guards import check_loader
        >>> items = [torch.tensor([float(i)]) for i in range(6)]
        >>> check_loader(DataLoader(items, batch_size=3))
        []
        >>> print(*check_loader(DataLoader(items, batch_size=3, collate_fn=lambda items: items[0])))
        rank 0: item-lost: the batch has the same bits if item 1 of 3 is another one; so for 2 items in all
    """
    if not isinstance(loader, DataLoader):
        raise ArgumentError(
            expected="a torch.utils.data.DataLoader",
            received=type(loader).__name__,
            remedy="pass the loader that the training loop iterates over",
        )
    found = [("workers-alike", message) for message in workers_alike(loader)]
    found += [("item-lost", message) for message in lost_items(loader)]
    return [Event("finding", rule, None, "error", message=message) for rule, message in found]


def varied_digests(batch: Any) -> list[str | None]:
    """Return the digest of each floating-point tensor; None for constants, which mean nothing if they are equal."""
    return [
        bits.digest(t) if t.numel() and bool((t != t.reshape(-1)[0]).any()) else None
        for t in tensors_in(batch)
        if t.is_floating_point() and t.layout == torch.strided
    ]


def workers_alike(loader: DataLoader[Any]) -> Iterator[str]:
    """Yield a sentence for each tensor that two workers return alike, though it differs from batch to batch."""
    workers = loader.num_workers
    batches = [varied_digests(batch) for batch in islice(loader, 2 * workers)] if workers else []
    if workers < 2 or len(batches) < 2 * workers:
        return
    first, second = batches[:workers], batches[workers:]
    for place in range(min(map(len, batches))):
        owner: dict[str, int] = {}
        for worker in range(workers):
            value = first[worker][place]
            if value is None or value == second[worker][place]:
                continue  # the same in every batch: part of the data
            if value in owner:
                yield f"tensor {place} of a batch has the same bits from workers {owner[value]} and {worker}"
                return
            owner[value] = worker


def lost_items(loader: DataLoader[Any]) -> Iterator[str]:
    """Yield a sentence if items of a batch do not change it."""
    size, dataset = loader.batch_size, loader.dataset
    if size is None or size < 2 or isinstance(dataset, IterableDataset) or len(dataset) <= size:  # type: ignore[arg-type]
        return
    items = [dataset[at] for at in range(size + 1)]
    other = items.pop()
    whole = digests(loader.collate_fn(items))
    if not whole or whole != digests(loader.collate_fn(items)):
        return  # random, or without tensors
    lost = []
    for at in range(min(size, MOST_ITEMS)):
        if digests(items[at]) != digests(other):
            changed = [*items[:at], other, *items[at + 1 :]]
            lost += [at] if digests(loader.collate_fn(changed)) == whole else []
    if lost:
        yield (
            f"the batch has the same bits if item {lost[0]} of {size} is another one; so for {len(lost)} items "
            "in all"
        )


def digests(value: Any) -> Sequence[str]:
    """Return the digests of the tensors of a value; of an item of lists or numbers, its text."""
    tensors: list[Tensor] = [t for t in tensors_in(value) if t.layout == torch.strided]
    return [bits.digest(tensor) for tensor in tensors] if tensors else [repr(value)]
