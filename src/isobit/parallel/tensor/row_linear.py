"""The row-parallel linear: a rank holds a run of inputs, and the output is one sum over all ranks' inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isobit import launches
from isobit.ops import dispatch
from isobit.ops.arguments import cast_for_autocast, check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.linear import partial
from isobit.ops.linear.op import check_linear
from isobit.ops.portable.rounding import round_once
from isobit.ops.portable.samples import spans_of
from isobit.ops.share import check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.collectives.additions import add_to_rows
from isobit.parallel.tensor.parameter_grads import bias_grad, operator, samples_of, weight_grad
from isobit.parallel.tensor.shard import Ranks, ranks_of, split_module


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    ranks: Ranks,
    samples: Samples | None = None,
) -> Tensor:
    """isobit.linear of an input that is spread over ranks: x [..., K/P], weight [N, K/P], the bias [N] on every rank.

    The ranks' fp32 sums are merged by the tree, then the bias is added once, then one rounding: the bits of the unsplit
    operator, forward and backward, on every rank. P must divide the segments of K.
    """
    x, weight, bias = cast_for_autocast(x, weight, bias)
    check_tensors(x=x, weight=weight, bias=bias)
    check_linear(x, weight, bias)
    known = samples_of(samples, x)
    spans_of(known, x)
    check_share(known, weight, bias)
    cut = Cut(weight.shape[1] * ranks.parts, ranks.parts, ranks.coordinate)
    return Row.apply(x, weight, bias, cut, ranks, known)  # type: ignore[no-untyped-call,no-any-return]


class Row(torch.autograd.Function):
    """Only the output is summed over ranks: all gradients are of what the rank holds."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cut: Cut,
        ranks: Ranks,
        samples: Samples,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.samples, ctx.has_bias, ctx.share = samples, bias is not None, share_in_force()
        total = partial.output(x, weight, cut).values[0]
        if launches.is_recording():
            sizes = (x.shape[:-1].numel(), *reversed(weight.shape))
            launches.record("linear", dispatch.is_native(x.dtype), x.dtype, sizes)
        ranks.merge(total)
        if bias is not None:
            add_to_rows(total, bias.to(total.dtype))
        return round_once(total, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
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


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank holds K/P columns; its input is a rank's part, its output is on every rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh | Ranks | None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.split(Ranks.of(mesh))

    @classmethod
    def from_linear(cls, module: nn.Linear, mesh: DeviceMesh | Ranks | None) -> RowParallelLinear:
        """This rank's part of a whole layer, which is left as it is."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = module.in_features, module.out_features
        made.weight = module.weight
        bias = module.bias
        made.bias = (
            None
            if bias is None
            else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        )
        made.split(Ranks.of(mesh))
        return made.train(module.training)

    def split(self, ranks: Ranks) -> None:
        """Keeps this rank's columns, and all of the bias; `in_features` stays that of the whole layer."""
        Cut(self.in_features, ranks.parts, ranks.coordinate)
        split_module(self, {"weight": 1}, ranks)

    def forward(self, input: Tensor, samples: Samples | None = None) -> Tensor:
        """The whole output; see row_linear."""
        ranks = ranks_of(self)
        assert ranks is not None
        return row_linear(input, self.weight, self.bias, ranks=ranks, samples=samples)
