"""Column-parallel linears: a rank computes a run of outputs, and dX is one sum over all ranks' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import ArgumentError, CutError
from isobit.ops.arguments import cast_for_autocast, check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.linear import partial
from isobit.ops.linear.group import check_groups
from isobit.ops.linear.op import check_linear, linear
from isobit.ops.portable.rounding import round_once
from isobit.ops.portable.samples import spans_of
from isobit.ops.share import check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import bias_grad, samples_of, weight_grad
from isobit.parallel.tensor.shard import Ranks, ranks_of, split_module


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    ranks: Ranks,
    samples: Samples | None = None,
) -> Tensor:
    """This rank's outputs of isobit.linear: x [..., K] is on every rank, weight [N/P, K] and bias [N/P] are its rows.

    The bits, forward and backward, are those of the unsplit operator. P must divide the segments of N.
    """
    return column_linear_group(
        x, (weight,), (bias,), groups=ranks.parts, ranks=ranks, samples=samples
    )[0]


def column_linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    groups: int,
    ranks: Ranks,
    samples: Samples | None = None,
) -> tuple[Tensor, ...]:
    """This rank's outputs of isobit.linear_group: it holds whole groups, of the unsplit problem's number of `groups`.

    dX of all the linears is one sum, so that one all-reduce suffices.
    """
    given = tuple(biases) if biases is not None else (None,) * len(weights)
    if len(given) != len(weights) or not weights:
        raise ArgumentError(
            expected="one or more weights, and a bias or None for each",
            received=f"{len(weights)} weights and {len(given)} biases",
            remedy="leave biases out where no layer has one",
        )
    if groups < 1 or groups % ranks.parts:
        raise CutError(
            expected=f"whole groups on each rank: a number of ranks that divides {groups}",
            received=f"{ranks.parts} ranks",
            remedy="use no more ranks than there are key heads, or shares of gate and up",
        )
    x, *cast = cast_for_autocast(x, *weights, *given)
    weights, given = cast[: len(weights)], tuple(cast[len(weights) :])
    for weight, bias in zip(weights, given, strict=True):
        check_tensors(x=x, weight=weight, bias=bias)
        check_linear(x, weight, bias)
        check_groups(weight, groups // ranks.parts)
    known = samples_of(samples, x)
    spans_of(known, x)
    check_share(known, *weights, *given)
    cut = Cut(sum(len(w) for w in weights) * ranks.parts, ranks.parts, ranks.coordinate)
    call = Call(ranks, known, cut, groups // ranks.parts, len(weights))
    outputs: tuple[Tensor, ...] = Column.apply(x, call, *weights, *given)  # type: ignore[no-untyped-call]
    return outputs


@dataclass(frozen=True)
class Call:
    """What backward must know besides tensors: `groups` are this rank's."""

    ranks: Ranks
    samples: Samples
    cut: Cut
    groups: int
    count: int


class Column(torch.autograd.Function):
    """Outputs are local; dX is summed by the tree over all ranks' outputs, and rounded once after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[: call.count], parameters[call.count :]
        ctx.save_for_backward(x, *weights)
        ctx.call, ctx.has_bias = call, [bias is not None for bias in biases]
        ctx.share = share_in_force()
        return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        call: Call = ctx.call
        if torch.is_grad_enabled():
            refuse_second_order("parallel.column_linear")()
        want, after = ctx.needs_input_grad, 2 + call.count
        # dX is on its way between ranks while the parameters' gradients, which are local, are computed.
        finish = begin_input_grad(grads, weights, call) if want[0] else None
        local = (
            *[
                weight_grad(g, x, call.samples, ctx.share) if want[2 + i] else None
                for i, g in enumerate(grads)
            ],
            *[
                bias_grad(g, call.samples, ctx.share) if has and want[after + i] else None
                for i, (g, has) in enumerate(zip(grads, ctx.has_bias, strict=True))
            ],
        )
        return None if finish is None else finish(), None, *local


def begin_input_grad(
    grads: Sequence[Tensor], weights: Sequence[Tensor], call: Call
) -> Callable[[], Tensor]:
    """dX: this rank's subtree of the sum, then, when what is returned is called, all ranks' merged and rounded once."""
    total = partial.group_input_grad(grads, weights, call.groups, call.cut).values[0]
    wait = call.ranks.begin_merge(total)

    def finish() -> Tensor:
        wait()
        return round_once(total, grads[0].dtype)

    return finish


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which each rank holds N/P rows and computes as many outputs; the input is on every rank."""

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
    def from_linear(
        cls, module: nn.Linear, mesh: DeviceMesh | Ranks | None
    ) -> ColumnParallelLinear:
        """This rank's part of a whole layer, which is left as it is."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = module.in_features, module.out_features
        made.weight, made.bias = module.weight, module.bias
        made.split(Ranks.of(mesh))
        return made.train(module.training)

    def split(self, ranks: Ranks) -> None:
        """Keeps this rank's rows; `out_features` stays that of the whole layer."""
        Cut(self.out_features, ranks.parts, ranks.coordinate)
        axes = {name: 0 for name in ("weight", "bias") if getattr(self, name) is not None}
        split_module(self, axes, ranks)

    def forward(self, input: Tensor, samples: Samples | None = None) -> Tensor:
        """This rank's outputs; see column_linear."""
        ranks = ranks_of(self)
        assert ranks is not None
        return column_linear(input, self.weight, self.bias, ranks=ranks, samples=samples)
