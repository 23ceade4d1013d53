"""Probes: a script states that a tensor must be the same, or different, on all ranks.

Outside a simulated run, and in runs that do not watch "training", probes do nothing, so they may stay in a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from isobit.simulator import rank as ranks

# (rank, name, tensor, members of the group, whether it must be the same)
Listener = Callable[[int, str, Tensor, tuple[int, ...], bool], None]
_listeners: list[Listener] = []


def same(name: str, tensor: Tensor, group: Any = None) -> None:
    """State that a tensor has the same bits on every rank of a group.

    The n-th call for a name on one rank is compared with the n-th on the others. `compare_with_one` also compares
    it with the n-th call on one rank.

    Args:
        name: A name for findings.
        tensor: The tensor of this rank.
        group: The process group; None is the whole world.

    Example:
        >>> import torch
        >>> from isobit.errors import TrainingError
        >>> from isobit.simulator import World, probe
        >>> def program(rank):
        ...     probe.same("scale", torch.tensor([float(rank == 2)]))
        >>> try:
        ...     World(4, watch=("training",)).run(program)
        ... except TrainingError as error:
        ...     print(error.kind, error.ranks)
        tensors differ (2,)
    """
    _show(name, tensor, group, alike=True)


def distinct(name: str, tensor: Tensor, group: Any = None) -> None:
    """State that no two ranks of a group have the same tensor: batches, masks, seeds.

    Args:
        name: A name for findings.
        tensor: The tensor of this rank.
        group: The process group; None is the whole world.
    """
    _show(name, tensor, group, alike=False)


def _show(name: str, tensor: Tensor, group: Any, alike: bool) -> None:
    if not ranks.inside():
        return
    here = ranks.current()
    members = range(here.world_size) if group is None else dist.get_process_group_ranks(group)
    for listener in _listeners:
        listener(here.index, name, tensor, tuple(members), alike)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for every probe while the context is open."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
