"""`Shard`: which part of a parameter a rank has; splitting modules, and full state dicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isobit.errors import ArgumentError, CutError, UnsupportedError
from isobit.ops.arguments import is_dtensor as is_dtensor
from isobit.parallel.collectives.levels import RankGroup
from isobit.parallel.same_environment import require_same_arithmetic
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup

_GROUP, _SHARDS = "_isobit_tp_group", "_isobit_shards"
_SHARD = "_isobit_shard"  # on a split parameter: a list of parameters has no module to look at


@dataclass(frozen=True)
class Shard:
    """Elements [offset, offset + length) of `full` along `axis` of a tensor."""

    mesh_axis: str
    coordinate: int  # of this rank on the mesh axis
    parts: int  # the number of ranks on the mesh axis
    axis: int  # of the tensor
    offset: int
    length: int
    full: int

    @classmethod
    def equal(cls, tp_group: TensorParallelGroup, axis: int, full: int) -> Shard:
        """Return this rank's of equal shares.

        Raises:
            CutError: The number of ranks does not divide `full`.
        """
        if full % tp_group.size:
            raise CutError(
                expected=f"a number of ranks that divides the extent {full}",
                received=f"{tp_group.size} ranks",
                remedy=f"choose a mesh axis {tp_group.name!r} whose size divides {full}",
            )
        length, rank = full // tp_group.size, tp_group.rank
        return cls(tp_group.name, rank, tp_group.size, axis, rank * length, length, full)

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.offset + self.length


def take_shard(full: Tensor, shard: Shard) -> Tensor:
    """Return a copy of a rank's part of a full tensor.

    Raises:
        ArgumentError: The tensor does not have the full extent.
    """
    if full.shape[shard.axis] != shard.full:
        raise ArgumentError(
            expected=f"{shard.full} elements along axis {shard.axis}",
            received=str(list(full.shape)),
            remedy="pass the full tensor, as it is before any split",
        )
    part = full.narrow(shard.axis, shard.offset, shard.length)
    return part.clone(memory_format=torch.contiguous_format)


def gather_shards(local: Tensor, shard: Shard, tp_group: TensorParallelGroup) -> Tensor:
    """Return the full tensor; all ranks of the group call this."""
    return torch.cat(list(tp_group.all_gather(local).unbind(0)), shard.axis)


def tp_group_of(module: nn.Module) -> TensorParallelGroup | None:
    """Return the ranks over which a module is split, or None if it is whole."""
    found: TensorParallelGroup | None = module.__dict__.get(_GROUP)
    return found


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Return the shards of a module's own parameters, by name."""
    return dict(module.__dict__.get(_SHARDS, {}))


def shard_of(parameter: Tensor) -> Any:
    """Return the shard that is recorded on a parameter, or None.

    A deep copy of a parameter has no record; its module still has one.
    """
    return getattr(parameter, _SHARD, None)


def shard_table(model: nn.Module) -> dict[str, Shard]:
    """Return the shards of all split parameters, by full name; every rank has all others whole."""
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, shard in shards_of(module).items()
    }


Ties = dict[nn.Parameter, nn.Parameter]


def split_module(
    module: nn.Module, axes: dict[str, int], tp_group: TensorParallelGroup, ties: Ties | None = None
) -> None:
    """Replace parameters by this rank's parts: all of them, or none if this raises.

    Args:
        module: The module, which is still whole.
        axes: The axis along which each named parameter is split.
        tp_group: The ranks to split over.
        ties: Pass one dictionary for all modules of a model to keep tied parameters tied.

    Raises:
        UnsupportedError: The module is split already.
        CutError: The number of ranks does not divide an extent.
        AgreementError: Ranks compute this dtype with different leaf arithmetic.
    """
    if tp_group_of(module) is not None:
        raise UnsupportedError(
            expected="a module that is whole",
            received=f"one split over {tp_group_of(module)}",
            remedy="split it once",
        )
    for dtype in {getattr(module, name).dtype for name in axes}:
        require_same_arithmetic(dtype, tp_group.group)
    shards = {
        name: Shard.equal(tp_group, axis, getattr(module, name).shape[axis])
        for name, axis in axes.items()
    }
    for name, shard in shards.items():
        parameter = _replace(module, name, partial(take_shard, shard=shard), ties)
        setattr(parameter, _SHARD, shard)
    module.__dict__[_GROUP], module.__dict__[_SHARDS] = tp_group, shards


def join_module(module: nn.Module, ties: Ties | None = None) -> None:
    """Undo `split_module`; all ranks call this together."""
    tp_group = tp_group_of(module)
    if tp_group is None:
        return
    for name, shard in shards_of(module).items():
        _replace(module, name, partial(gather_shards, shard=shard, tp_group=tp_group), ties)
    del module.__dict__[_GROUP], module.__dict__[_SHARDS]


def _replace(
    module: nn.Module, name: str, make: Callable[[Tensor], Tensor], ties: Ties | None
) -> nn.Parameter:
    old: nn.Parameter = getattr(module, name)
    new = None if ties is None else ties.get(old)
    if new is None:
        new = nn.Parameter(make(old.detach()), requires_grad=old.requires_grad)
    if ties is not None:
        ties[old] = new
    setattr(module, name, new)
    return new


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the unsplit model on every rank; all ranks call this together."""
    shards = shard_table(model)
    return {
        name: gather_shards(value, shards[name], owner_of(model, name))
        if name in shards
        else value.detach().clone()
        for name, value in model.state_dict().items()
    }


@torch.no_grad()
def load_full_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load this rank's parts of the state dict of an unsplit model."""
    shards = shard_table(model)
    model.load_state_dict(
        {name: take_shard(v, shards[name]) if name in shards else v for name, v in state.items()}
    )


def owner_of(model: nn.Module, name: str) -> TensorParallelGroup:
    """Return the ranks over which a split parameter is spread."""
    tp_group = tp_group_of(model.get_submodule(name.rpartition(".")[0]))
    assert tp_group is not None
    return tp_group


# This rank's part of a tensor, whether a DTensor or a tensor-parallel shard, counted once.
#
# Norms and digests over ranks must count every element of the whole tensor exactly once.


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
