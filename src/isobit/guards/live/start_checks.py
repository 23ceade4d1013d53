"""Checks before a run: the data loader, the links between ranks, and what wraps the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from isobit import bits
from isobit.errors import ArgumentError
from isobit.guards.live.events import Event
from isobit.guards.live.module_replay import tensors_in
from isobit.guards.live.optimizer_checks import name_some
from isobit.parallel.collectives.levels import RankGroup

# `check_loader`: whether workers of a DataLoader repeat each other, and whether every item reaches its batch.

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


# `check_links`: send known numbers between every two ranks before a run, and name the links that change them.


def check_links(group: dist.ProcessGroup | None = None, *, elements: int = 2**16) -> list[Event]:
    """Send known numbers from every rank to every other one, and compare their bits. Every rank must call this.

    A message that is lost altogether is a timeout of the group. What was found is summed over the ranks by an
    all-reduce, so that every rank reports every link.

    Args:
        group: The ranks; None is the world.
        elements: Numbers of 8 bytes per message.

    Returns:
        A finding `link-changes-data` per link, the same on every rank.

    Raises:
        ArgumentError: If `elements` is not positive, or this rank is not in the group.

    Example:
        >>> from isobit.guards import check_links
        >>> from isobit.simulator import Flip, World
        >>> World(3).run(lambda rank: check_links()).values
        [[], [], []]
        >>> flipped = World(3, faults=[Flip(rank=1, element=7)]).run(lambda rank: check_links())
        >>> print(flipped.values[0][0])
        rank 0: link-changes-data: from rank 1 to rank 2: 1 of 65536 numbers differ, first at [7]
    """
    if elements < 1:
        raise ArgumentError(
            expected="at least one number per message",
            received=f"elements={elements}",
            remedy="pass elements=65536",
        )
    here = RankGroup.of(group)
    count, me = len(here.ranks), here.index
    wrong = [0] * (count * count)  # by sender and receiver
    first = [0] * (count * count)
    for distance in range(1, count):
        to, source = (me + distance) % count, (me - distance) % count
        received = torch.zeros(elements, dtype=torch.int64, device=here.device)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend,
                    pattern(me, to, elements).to(here.device),
                    here.ranks[to],
                    here.group,
                ),
                dist.P2POp(dist.irecv, received, here.ranks[source], here.group),
            ]
        )
        for work in works:
            work.wait()
        differs = (received.cpu() != pattern(source, me, elements)).nonzero()
        wrong[source * count + me] = len(differs)
        first[source * count + me] = int(differs[0]) if len(differs) else 0
    totals = here.add_integers([*wrong, *first])
    rank = here.rank
    return [
        Event(
            "finding",
            "link-changes-data",
            float(totals[at]),
            "error",
            rank=rank,
            message=f"from rank {here.ranks[at // count]} to rank {here.ranks[at % count]}: "
            f"{totals[at]} of {elements} numbers differ, first at [{totals[count * count + at]}]",
        )
        for at in range(count * count)
        if totals[at]
    ]


def pattern(source: int, to: int, elements: int) -> Tensor:
    """Return the numbers of one link: the rank of a message that arrives at the wrong place shows too."""
    generator = torch.Generator().manual_seed(source * 1_000_003 + to)
    return torch.randint(-(2**62), 2**62, (elements,), generator=generator)


# Checks of what wraps a model: DistributedDataParallel, and the attributes that a wrapper overwrites.


def check_reduced(model: nn.Module) -> Iterator[str]:
    """Yield a sentence if DistributedDataParallel does not reduce the gradients of parameters that the model has now.

    Args:
        model: Any model; only DistributedDataParallel is judged.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    reduced = {id(p) for p in model._module_parameters} | {
        id(p) for n, p in model.module.named_parameters() if n in model.parameters_to_ignore
    }
    trainable = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
    strange = [name for name, p in trainable if id(p) not in reduced]
    if strange:
        yield (
            f"{len(strange)} of {len(trainable)} trainable parameters were replaced after the model was wrapped, so "
            f"their gradients are not reduced over ranks: {name_some(strange)}"
        )


@contextmanager
def same_attributes(model: nn.Module) -> Iterator[list[Event]]:
    """Report attributes of modules that a block of code overwrites, such as a wrapper that sets `module.id`.

    Attributes that did not exist before, names that start with an underscore, tensors, modules and `training` are not
    compared.

    Args:
        model: The model.

    Returns:
        A context manager. It gives a list, which has the findings `attribute-overwritten` after the block.

    Example:
        >>> from isobit.guards import same_attributes
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> model[0].id = "encoder"
        >>> with same_attributes(model) as found:
        ...     model[0].id = 0
        >>> print(*found)
        rank 0: attribute-overwritten: 0: id was 'encoder' and is 0
    """
    before = {name: (module, plain_attributes(module)) for name, module in model.named_modules()}
    found: list[Event] = []
    yield found
    for name, (module, kept) in before.items():
        now = vars(module)
        for key, value in kept.items():
            if key in now and (now[key] is value or now[key] == value):
                continue
            after = f"is {now[key]!r}" if key in now else "is gone"
            text = f"{key} was {value!r} and {after}"
            found.append(
                Event(
                    "finding", "attribute-overwritten", severity="error", module=name, message=text
                )
            )


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers, strings or None."""
    return {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and key != "training"
        and isinstance(value, bool | int | float | str | type(None))
    }
