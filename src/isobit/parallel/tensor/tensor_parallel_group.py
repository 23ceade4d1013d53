"""`TensorParallelGroup`: the ranks that compute one layer together, and their collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import ArgumentError
from isobit.ops import dispatch
from isobit.ops.portable.samples import as_samples, spans_of, whole_samples
from isobit.ops.share import Share, as_partial
from isobit.order.samples import Samples
from isobit.parallel.collectives import tree_collectives
from isobit.parallel.collectives.levels import Levels


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks along one axis of a device mesh, seen from this rank."""

    name: str  # of the mesh axis
    group: dist.ProcessGroup | None  # None is one rank alone
    rank: int  # in the group
    size: int
    mesh: DeviceMesh | None = None

    @classmethod
    def of(
        cls, where: TensorParallelGroup | DeviceMesh | dist.ProcessGroup | None
    ) -> TensorParallelGroup:
        """Make a group from a mesh of one axis or a process group; None is one rank alone.

        Raises:
            ArgumentError: The mesh has several axes.
        """
        if where is None:
            return cls("tp", None, 0, 1)
        if isinstance(where, TensorParallelGroup):
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
        if isinstance(where, Levels):
            raise ArgumentError(
                expected="one process group for tensor parallelism",
                received=f"{where}",
                remedy="pass the mesh axis of the ranks of a host, as mesh['tp']",
            )
        return cls("tp", where, dist.get_rank(where), dist.get_world_size(where))

    def all_reduce(self, total: Tensor) -> None:
        """Sum over the ranks in place: rank r's value is leaf r of the balanced tree."""
        if self.size > 1:
            tree_collectives.all_reduce(total, self.group)

    def start_all_reduce(self, total: Tensor) -> Callable[[], object]:
        """Start `all_reduce` and return a function that waits for it."""
        work = None
        if self.size > 1:
            work = tree_collectives.all_reduce(total, self.group, async_op=True)
        return work.wait if work is not None else lambda: None

    def combine_bits(self, held: Tensor) -> Tensor:
        """Combine tensors whose elements are each set on one rank, and +0.0 on all others.

        Raw bits are summed as integers, so that -0.0 survives; integer sums have no order. Two
        16-bit elements are one int32, since backends do not support int16.
        """
        if self.size == 1:
            return held
        flat = held.reshape(-1)
        if flat.element_size() == 2 and flat.numel() % 2:
            flat = torch.cat([flat, flat.new_zeros(1)])
        words = flat.view(torch.int64 if flat.element_size() == 8 else torch.int32)
        dist.all_reduce(words, group=self.group)
        return flat[: held.numel()].view(held.shape)

    def all_gather(self, local: Tensor) -> Tensor:
        """Return all ranks' tensors [...], stacked to [size, ...]. Nothing is added."""
        mine = local.detach().contiguous()
        if self.size == 1:
            return mine.unsqueeze(0)
        stacked = mine.new_empty((self.size, *mine.shape))
        dist.all_gather(list(stacked.unbind(0)), mine, group=self.group)
        return stacked

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        """Return this group: a copied module is computed by the same ranks."""
        return self

    def require_mesh(self) -> DeviceMesh:
        """Return the mesh, made from the process group if there was none."""
        if self.mesh is not None:
            return self.mesh
        assert self.group is not None
        return DeviceMesh.from_group(self.group, "cpu", mesh_dim_names=(self.name,))


# Gradients of a split linear layer's parameters, which need no communication.
#
# Of a share of the global batch they are unrounded fp32; of the whole batch they are rounded once.


def samples_of(samples: Samples | Tensor | None, rows: Tensor) -> Samples:
    """Return the given samples, or the operators' default: [B, T, K] is B samples."""
    known = as_samples(samples)
    return whole_samples(rows, None) if known is None else known


def weight_grad(grad: Tensor, x: Tensor, samples: Samples, share: Share | None) -> Tensor:
    """Return dW [N, K] of these samples; `share` is the one that was open in the forward."""
    return as_partial(operator("weight", x)(grad, x, spans_of(samples, x), samples.total), share)


def bias_grad(grad: Tensor, samples: Samples, share: Share | None) -> Tensor:
    """Return db [N] of these samples."""
    return as_partial(operator("bias", grad)(grad, spans_of(samples, grad), samples.total), share)


def operator(kind: str, given: Tensor) -> Callable[..., Tensor]:
    """Return the operator for a gradient ("input", "weight", "bias"), native or portable."""
    prefix = "linear" if dispatch.is_native(given.dtype) else "portable_linear"
    return getattr(torch.ops.isobit, f"{prefix}_{kind}_grad")  # type: ignore[no-any-return]
