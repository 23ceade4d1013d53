"""Which part of a parameter a rank holds: by mesh axis, coordinate and offset, never by a flat index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import ArgumentError, CutError, UnsupportedError
from isobit.parallel.collectives import all_reduce
from isobit.parallel.same_environment import require_alike_engines

_RANKS, _SHARDS = "_isobit_ranks", "_isobit_shards"
_SHARD = "_isobit_shard"  # on a split parameter itself: lists of parameters have no module to ask


@dataclass(frozen=True)
class Ranks:
    """The ranks along one mesh axis, as this process stands among them; a group of None is one rank alone."""

    name: str
    group: dist.ProcessGroup | None
    coordinate: int
    parts: int
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, where: Ranks | DeviceMesh | dist.ProcessGroup | None) -> Ranks:
        """Of a mesh of one axis, or of a process group; None is one rank alone."""
        if where is None:
            return cls("tp", None, 0, 1)
        if isinstance(where, Ranks):
            return where
        if isinstance(where, DeviceMesh):
            if where.ndim != 1:
                raise ArgumentError(
                    expected="a mesh of one axis",
                    received=f"axes {where.mesh_dim_names or where.ndim}",
                    remedy='name the axis, as mesh["tp"]',
                )
            name = where.mesh_dim_names[0] if where.mesh_dim_names else "tp"
            return cls(name, where.get_group(), where.get_local_rank(), where.size(), where)
        return cls("tp", where, dist.get_rank(where), dist.get_world_size(where))

    def merge(self, total: Tensor) -> None:
        """All ranks' subtrees of one sum, in place: rank r's is leaf r of the balanced tree over ranks."""
        if self.parts > 1:
            all_reduce.all_reduce(total, self.group)

    def begin_merge(self, total: Tensor) -> Callable[[], object]:
        """The same, beside what the caller computes until it calls what is returned."""
        work = all_reduce.all_reduce(total, self.group, async_op=True) if self.parts > 1 else None
        return work.wait if work is not None else lambda: None

    def combine(self, held: Tensor) -> Tensor:
        """The ranks' tensors of which one has each element and all others +0, with its raw bits, so that −0 survives.

        Bits are added as whole numbers, which has no order; two 16-bit ones as one word, since transports lack those.
        """
        if self.parts == 1:
            return held
        flat = held.reshape(-1)
        if flat.element_size() == 2 and flat.numel() % 2:
            flat = torch.cat([flat, flat.new_zeros(1)])
        dist.all_reduce(
            flat.view(torch.int64 if flat.element_size() == 8 else torch.int32), group=self.group
        )
        return flat[: held.numel()].view(held.shape)

    def gather(self, local: Tensor) -> Tensor:
        """[P, ...] of all ranks' tensors of one shape: bytes are moved, nothing is added."""
        mine = local.detach().contiguous()
        if self.parts == 1:
            return mine.unsqueeze(0)
        held = mine.new_empty((self.parts, *mine.shape))
        dist.all_gather(list(held.unbind(0)), mine, group=self.group)
        return held

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """A copied module stands among the same ranks."""
        return self

    def require_mesh(self) -> DeviceMesh:
        """The mesh, made from the group where there was none."""
        if self.mesh is not None:
            return self.mesh
        assert self.group is not None
        return DeviceMesh.from_group(self.group, "cpu", mesh_dim_names=(self.name,))


@dataclass(frozen=True)
class Shard:
    """Elements [offset, offset + length) of `full` along `axis` of a tensor: the coordinate's of `parts` shares."""

    mesh_axis: str
    coordinate: int
    parts: int
    axis: int
    offset: int
    length: int
    full: int

    @classmethod
    def equal(cls, ranks: Ranks, axis: int, full: int) -> Shard:
        """One of equal shares, or a refusal."""
        if full % ranks.parts:
            raise CutError(
                expected=f"a number of ranks that divides the extent {full}",
                received=f"{ranks.parts} ranks",
                remedy=f"choose a mesh axis {ranks.name!r} whose size divides {full}",
            )
        length = full // ranks.parts
        return cls(
            ranks.name, ranks.coordinate, ranks.parts, axis, ranks.coordinate * length, length, full
        )

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.offset + self.length


def take(full: Tensor, shard: Shard) -> Tensor:
    """A rank's part of a full tensor, in memory of its own."""
    if full.shape[shard.axis] != shard.full:
        raise ArgumentError(
            expected=f"{shard.full} elements along axis {shard.axis}",
            received=str(list(full.shape)),
            remedy="pass the full tensor, as it is before any split",
        )
    return full.narrow(shard.axis, shard.offset, shard.length).clone(
        memory_format=torch.contiguous_format
    )


def gather(local: Tensor, shard: Shard, ranks: Ranks) -> Tensor:
    """The full tensor, on every rank."""
    return torch.cat(list(ranks.gather(local).unbind(0)), shard.axis)


# ---- the table of a module, and of a model ------------------------------------------------------------------


def ranks_of(module: nn.Module) -> Ranks | None:
    """The ranks that a module is computed by, or None where it is whole."""
    found: Ranks | None = module.__dict__.get(_RANKS)
    return found


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """The shards of a module's own parameters, by their names in it."""
    return dict(module.__dict__.get(_SHARDS, {}))


def shard_of(parameter: Tensor) -> Any:
    """The shard that a split parameter itself knows of, or None. A deep copy knows of none; its module does."""
    return getattr(parameter, _SHARD, None)


def table(model: nn.Module) -> dict[str, Shard]:
    """The shards of all parameters of a model, by their full names; what is not here every rank holds whole."""
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, shard in shards_of(module).items()
    }


Ties = dict[nn.Parameter, nn.Parameter]


def split_module(
    module: nn.Module, axes: dict[str, int], ranks: Ranks, ties: Ties | None = None
) -> None:
    """Puts this rank's part in the place of each named parameter, all or none; `ties` keeps tied ones tied."""
    if ranks_of(module) is not None:
        raise UnsupportedError(
            expected="a module that is whole",
            received=f"one split over {ranks_of(module)}",
            remedy="split it once",
        )
    for dtype in {getattr(module, name).dtype for name in axes}:
        require_alike_engines(dtype, ranks.group)
    shards = {
        name: Shard.equal(ranks, axis, getattr(module, name).shape[axis])
        for name, axis in axes.items()
    }
    for name, shard in shards.items():
        setattr(replace_parameter(module, name, partial(take, shard=shard), ties), _SHARD, shard)
    module.__dict__[_RANKS], module.__dict__[_SHARDS] = ranks, shards


def join_module(module: nn.Module, ties: Ties | None = None) -> None:
    """The inverse of `split_module`, on all ranks together."""
    ranks = ranks_of(module)
    if ranks is None:
        return
    for name, shard in shards_of(module).items():
        replace_parameter(module, name, partial(gather, shard=shard, ranks=ranks), ties)
    del module.__dict__[_RANKS], module.__dict__[_SHARDS]


def replace_parameter(
    module: nn.Module, name: str, made: Callable[[Tensor], Tensor], ties: Ties | None
) -> nn.Parameter:
    """Another leaf in a parameter's place."""
    old: nn.Parameter = getattr(module, name)
    new = None if ties is None else ties.get(old)
    if new is None:
        new = nn.Parameter(made(old.detach()), requires_grad=old.requires_grad)
    if ties is not None:
        ties[old] = new
    setattr(module, name, new)
    return new


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict before any split, on every rank: all ranks call this together."""
    shards = table(model)
    owners = {name: owner_of(model, name) for name in shards}
    return {
        name: gather(value, shards[name], owners[name])
        if name in shards
        else value.detach().clone()
        for name, value in model.state_dict().items()
    }


@torch.no_grad()
def load_full_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Takes this rank's parts of a full state dict."""
    shards = table(model)
    model.load_state_dict(
        {name: take(v, shards[name]) if name in shards else v for name, v in state.items()}
    )


def owner_of(model: nn.Module, name: str) -> Ranks:
    """The ranks that a split parameter is spread over."""
    ranks = ranks_of(model.get_submodule(name.rpartition(".")[0]))
    assert ranks is not None
    return ranks
