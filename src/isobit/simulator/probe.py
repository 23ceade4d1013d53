"""What a script may say of its own tensors: the same on all ranks, or distinct. Outside a world it says nothing."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from isobit.simulator import rank as ranks


def same(name: str, tensor: Tensor, group: Any = None) -> None:
    """Every rank of the group must hold these bits, the n-th time as the n-th; and one worker about these numbers."""
    _note(name, tensor, group, alike=True)


def distinct(name: str, tensor: Tensor, group: Any = None) -> None:
    """No two ranks of the group may hold the same: batches, masks, seeds."""
    _note(name, tensor, group, alike=False)


def _note(name: str, tensor: Tensor, group: Any, alike: bool) -> None:
    if not ranks.inside():
        return
    here = ranks.current()
    members = (
        tuple(range(here.world.ranks))
        if group is None
        else tuple(dist.get_process_group_ranks(group))
    )
    if here.world.watch.training is not None:
        here.world.watch.training.note_tensor(here.index, name, tensor, members, alike)
