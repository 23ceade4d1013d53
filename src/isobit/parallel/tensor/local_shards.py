"""This rank's part of a tensor, whether a DTensor or a tensor-parallel shard, counted once.

Norms and digests over ranks must count every element of the whole tensor exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.arguments import is_dtensor as is_dtensor
from isobit.parallel.collectives.rank_group import RankGroup
from isobit.parallel.tensor.shard import shard_of, shards_of


@dataclass(frozen=True)
class LocalShard:
    """This rank's elements of a tensor."""

    local: Tensor
    where: str = ""  # describes which elements these are; empty if they are all


def find_shards(model: nn.Module) -> dict[int, Any]:
    """Return the shards of all tensor-parallel parameters, by the parameter's id."""
    return {
        id(getattr(module, name)): shard
        for module in model.modules()
        for name, shard in shards_of(module).items()
    }


def local_shard_of(tensor: Tensor, shards: Mapping[int, Any] | None = None) -> LocalShard:
    """Return this rank's part of a parameter: whole, a DTensor, or tensor-parallel.

    Raises:
        UnsupportedError: The DTensor has a partial placement.
    """
    if is_dtensor(tensor):
        mesh, parts = tensor.device_mesh, []  # type: ignore[attr-defined]
        for axis, placement in enumerate(sharding_placements(tensor)):
            if placement is not None:
                parts.append(f"{placement} {mesh.get_local_rank(axis)} of {mesh.size(axis)}")
        where = f"{', '.join(parts)} of {list(tensor.shape)}" if parts else ""
        return LocalShard(tensor.detach().to_local(), where)  # type: ignore[attr-defined]
    shard = find_record(tensor, shards)
    return LocalShard(tensor, "" if shard is None or shard.parts == 1 else str(shard))


def find_record(tensor: Tensor, shards: Mapping[int, Any] | None = None) -> Any:
    """Return the shard of a tensor-parallel parameter, or None."""
    return (shards or {}).get(id(tensor), shard_of(tensor))


def sharding_placements(tensor: Any) -> list[Any]:
    """Return, per mesh axis, the placement that shards a DTensor, or None if it replicates.

    Raises:
        UnsupportedError: A placement is partial, that is a sum which was not computed yet.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(
            expected="placements that shard or replicate",
            received=f"{tensor.placements}",
            remedy="redistribute it first: a partial placement is a sum that was not computed yet",
        )
    return [None if placement.is_replicate() else placement for placement in tensor.placements]


def counted_here(
    parameters: Iterable[Tensor], ranks: RankGroup, shards: Mapping[int, Any]
) -> list[Tensor]:
    """Return the gradients that this rank adds to a sum over the ranks: each element once.

    Raises:
        ArgumentError: The ranks are not those that have the shards.
        UnsupportedError: A gradient has a partial placement.
    """
    found = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        shard = find_record(parameter, shards)
        if is_dtensor(grad):
            if is_first_holder(grad, ranks):
                found.append(grad.to_local())  # type: ignore[attr-defined]
        elif shard is not None and shard.parts > 1:
            if shard.parts != len(ranks.ranks):
                raise ArgumentError(
                    expected=f"the group of the {shard.parts} ranks that have the shards of a "
                    "parameter",
                    received=f"a group of {len(ranks.ranks)}",
                    remedy=f"pass the group of mesh axis {getattr(shard, 'mesh_axis', 'tp')!r}",
                )
            found.append(grad)
        elif ranks.is_first:
            found.append(grad)
    return found


def is_first_holder(tensor: Any, ranks: RankGroup) -> bool:
    """Return whether this is the first rank of the group that has this shard of a DTensor.

    Raises:
        ArgumentError: The group does not have all shards.
    """
    mesh, group = tensor.device_mesh.mesh, set(ranks.ranks)
    placements = sharding_placements(tensor)
    sharded = [axis for axis, placement in enumerate(placements) if placement is not None]
    replicated = [axis for axis in range(mesh.ndim) if axis not in sharded]
    # Row i of the permuted mesh has the ranks that share shard i.
    copies = math.prod(mesh.shape[axis] for axis in replicated)
    rows = mesh.permute(*sharded, *replicated).reshape(-1, copies).tolist()
    holders = [[rank for rank in row if rank in group] for row in rows]
    if not all(holders):
        raise ArgumentError(
            expected=f"a group that has all {len(rows)} shards of a gradient",
            received=f"ranks {sorted(group)}, which have {sum(map(bool, holders))}",
            remedy="pass the group of all sharded mesh axes, or None for the default group",
        )
    order = {rank: at for at, rank in enumerate(ranks.ranks)}
    mine = next(row for row, whole in zip(holders, rows, strict=True) if ranks.rank in whole)
    return bool(min(mine, key=order.__getitem__) == ranks.rank)
