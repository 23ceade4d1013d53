"""The row-parallel linear layer: each rank has a run of the inputs.

The output is one sum over all ranks' inputs. The backward needs no communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.foundation import launches
from isobit.ops import dispatch
from isobit.ops.arguments import cast_for_autocast, check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.linear import partial
from isobit.ops.linear.op import check_linear
from isobit.ops.portable.samples import check_rows
from isobit.ops.portable.sums import round_once
from isobit.ops.share import check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.collectives.elementwise_add import add_to_rows
from isobit.parallel.tensor.parallel_linear import ParallelLinear
from isobit.parallel.tensor.parameter_grads import bias_grad, operator, samples_of, weight_grad
from isobit.parallel.tensor.shard import split_module
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tp_group: TensorParallelGroup,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Compute `isobit.linear` of an input that is split over ranks, with the unsplit bits.

    The ranks' fp32 sums are all-reduced along the tree, then the bias is added, then the result is
    rounded once.

    Args:
        x: This rank's part of the input. # [..., K/P]
        weight: This rank's columns. # [N, K/P]
        bias: The whole bias, on every rank, or None. # [N]
        tp_group: The P ranks; P must divide the segments of K.
        samples: Which rows of x belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        The whole output, on every rank. # [..., N]
    """
    x, weight, bias = cast_for_autocast(x, weight, bias)
    check_tensors(x=x, weight=weight, bias=bias)
    check_linear(x, weight, bias)
    known = samples_of(samples, x)
    check_rows(known, x)
    check_share(known, weight, bias)
    cut = Cut(weight.shape[1] * tp_group.size, tp_group.size, tp_group.rank)
    return RowLinear.apply(x, weight, bias, cut, tp_group, known)  # type: ignore[no-untyped-call,no-any-return]


class RowLinear(torch.autograd.Function):
    """Sums the output over ranks; all gradients are local."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cut: Cut,
        tp_group: TensorParallelGroup,
        samples: Samples,
    ) -> Tensor:
        """Sum the output [..., N] over ranks, add the bias and round once."""
        ctx.save_for_backward(x, weight)
        ctx.samples, ctx.has_bias, ctx.share = samples, bias is not None, share_in_force()
        total = partial.output(x, weight, cut).values[0]
        if launches.is_recording():
            sizes = (x.shape[:-1].numel(), *reversed(weight.shape))
            launches.record("linear", dispatch.executor_of(x.dtype), x.dtype, sizes)
        tp_group.all_reduce(total)
        if bias is not None:
            add_to_rows(total, bias.to(total.dtype))
        return round_once(total, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Compute dx [..., K/P], dW [N, K/P] and db [N], all local."""
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.row_linear")()
        want = ctx.needs_input_grad
        return (
            operator("input", grad)(grad, weight) if want[0] else None,
            weight_grad(grad, x, ctx.samples, ctx.share) if want[1] else None,
            bias_grad(grad, ctx.samples, ctx.share) if ctx.has_bias and want[2] else None,
            *[None] * 3,
        )


class RowParallelLinear(ParallelLinear):
    """A linear layer whose K columns are split over P ranks; its output is whole on every rank.

    `in_features` stays that of the whole layer. Arguments: see `ParallelLinear`.

    Example:
        Two simulated ranks have the output of one, bit for bit.

        >>> import torch
        >>> import torch.distributed as dist
        >>> import isobit
        >>> from isobit.parallel import RowParallelLinear
        >>> from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
        >>> from isobit.simulator import World
        >>> whole, x = isobit.nn.Linear(512, 32), torch.randn(2, 3, 512)
        >>> def forward(rank):
        ...     tp_group = TensorParallelGroup.of(dist.group.WORLD)
        ...     layer = RowParallelLinear.from_linear(whole, tp_group)
        ...     return layer(x.chunk(2, -1)[rank].contiguous())
        >>> all(isobit.bits.equal(y, whole(x)) for y in World(2).run(forward).values)
        True
    """

    def split(self, tp_group: TensorParallelGroup) -> None:
        """Keep this rank's columns of the weight, and the whole bias."""
        Cut(self.in_features, tp_group.size, tp_group.rank)
        split_module(self, {"weight": 1}, tp_group)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute the whole output [..., N] of this rank's part [..., K/P] of the input."""
        return row_linear(input, self.weight, self.bias, tp_group=self.tp_group, samples=samples)
