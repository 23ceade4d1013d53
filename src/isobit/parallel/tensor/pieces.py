"""Which piece of a parameter this rank holds, and which of the ranks that hold the same one counts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.parallel.collectives.group import Members
from isobit.parallel.tensor.shard import shard_of, shards_of


@dataclass(frozen=True)
class Piece:
    """A rank's own elements; `where` tells which of the whole they are, empty where they are all of it."""

    local: Tensor
    where: str = ""


def find_shards(model: nn.Module) -> dict[int, Any]:
    """Records of tensor-parallel parameters, by the parameter's id."""
    return {
        id(getattr(module, name)): shard
        for module in model.modules()
        for name, shard in shards_of(module).items()
    }


def piece_of(tensor: Tensor, shards: Mapping[int, Any] | None = None) -> Piece:
    """Of a parameter, whether whole, a DTensor or one with a record of its shard."""
    if is_dtensor(tensor):
        mesh, parts = tensor.device_mesh, []  # type: ignore[attr-defined]
        for axis, placement in enumerate(sharded_axes(tensor)):
            if placement is not None:
                parts.append(f"{placement} {mesh.get_local_rank(axis)} of {mesh.size(axis)}")
        where = f"{', '.join(parts)} of {list(tensor.shape)}" if parts else ""
        return Piece(tensor.detach().to_local(), where)  # type: ignore[attr-defined]
    shard = record_of(tensor, shards)
    return Piece(tensor, "" if shard is None or shard.parts == 1 else str(shard))


def record_of(tensor: Tensor, shards: Mapping[int, Any] | None = None) -> Any:
    """The shard of a tensor-parallel parameter, or None."""
    return (shards or {}).get(id(tensor), shard_of(tensor))


def is_dtensor(tensor: Tensor) -> bool:
    """Without loading what is not in use."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def sharded_axes(tensor: Any) -> list[Any]:
    """Of each mesh axis the placement that cuts the tensor, or None; a pending sum has no bits yet."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(
            expected="placements that shard or replicate",
            received=f"{tensor.placements}",
            remedy="redistribute it first: a partial placement is a sum that was not taken yet",
        )
    return [None if placement.is_replicate() else placement for placement in tensor.placements]


def counted_here(
    parameters: Iterable[Tensor], members: Members, shards: Mapping[int, Any]
) -> list[Tensor]:
    """This rank's gradients that enter a sum over the members: every element of the whole once."""
    found = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        shard = record_of(parameter, shards)
        if is_dtensor(grad):
            if is_first_holder(grad, members):
                found.append(grad.to_local())  # type: ignore[attr-defined]
        elif shard is not None and shard.parts > 1:
            if shard.parts != len(members.ranks):
                raise ArgumentError(
                    expected=f"the group of the {shard.parts} ranks that hold the shards of a parameter",
                    received=f"a group of {len(members.ranks)}",
                    remedy=f"pass the group of mesh axis {getattr(shard, 'mesh_axis', 'tp')!r}",
                )
            found.append(grad)
        elif members.is_first:
            found.append(grad)
    return found


def is_first_holder(tensor: Any, members: Members) -> bool:
    """Whether no earlier member holds this piece; a group that lacks a piece is refused."""
    mesh, group = tensor.device_mesh.mesh, set(members.ranks)
    cut = [axis for axis, placement in enumerate(sharded_axes(tensor)) if placement is not None]
    kept = [axis for axis in range(mesh.ndim) if axis not in cut]
    # Rows of the permuted mesh are pieces; what stands in a row are the ranks that hold it.
    pieces = (
        mesh.permute(*cut, *kept).reshape(-1, _product(mesh.shape[axis] for axis in kept)).tolist()
    )
    holders = [[rank for rank in row if rank in group] for row in pieces]
    if not all(holders):
        raise ArgumentError(
            expected=f"a group that holds all {len(pieces)} pieces of a gradient",
            received=f"ranks {sorted(group)}, which hold {sum(map(bool, holders))}",
            remedy="pass the group of all sharded mesh axes, or none for the world",
        )
    order = {rank: at for at, rank in enumerate(members.ranks)}
    mine = next(row for row, whole in zip(holders, pieces, strict=True) if members.rank in whole)
    return bool(min(mine, key=order.__getitem__) == members.rank)


def _product(numbers: Iterable[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total
