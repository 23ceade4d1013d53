"""`replicated_tensors`: the tensors that every rank of a tensor-parallel group should have with the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from isobit.errors import ArgumentError
from isobit.parallel.tensor.shard import find_record, find_shards, is_dtensor


def replicated_tensors(
    model: nn.Module, group: dist.ProcessGroup | None = None, sharded: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Return the parameters and buffers that a tensor-parallel group does not shard: norms, biases, positions.

    Pass them to `rank_agreement` with the same group. Layer norms that differ between tensor-parallel ranks train on
    without an error: each rank clips or updates its own copy.

    Args:
        model: A model with isobit's shards, with DTensors, or sharded by hand.
        group: The tensor-parallel ranks; None is the world.
        sharded: Patterns of names that are sharded by hand, such as "*.qkv.weight".

    Returns:
        Tensors by name.

    Raises:
        ArgumentError: If none is left.

    Example:
        >>> from isobit.guards import replicated_tensors
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
        >>> list(replicated_tensors(model, sharded=["1.*"]))
        ['0.weight', '0.bias']
    """
    patterns, shards = tuple(sharded), find_shards(model)
    ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
    found = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
        and is_replicated(tensor, shards, ranks)
    }
    if not found:
        raise ArgumentError(
            expected="a model with a tensor that the group does not shard",
            received=f"a model whose tensors are all sharded, or match {patterns}",
            remedy="pass patterns of the sharded names only",
        )
    return found


def is_replicated(tensor: Tensor, shards: dict[int, Any], ranks: list[int]) -> bool:
    """Return whether the ranks of a group have the same elements of a tensor."""
    if is_dtensor(tensor):
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        for axis, placement in enumerate(placements):
            if dist.get_process_group_ranks(mesh.get_group(axis)) == ranks:
                return bool(placement.is_replicate())
        return all(placement.is_replicate() for placement in placements)
    shard = find_record(tensor, shards)
    return shard is None or shard.parts == 1
