"""The column-parallel linear layer: each rank computes a run of the outputs.

The forward needs no communication. The input's gradient dX is one sum over all ranks' outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, CutError
from isobit.ops.arguments import cast_for_autocast, check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.linear import partial
from isobit.ops.linear.group import check_groups
from isobit.ops.linear.op import check_linear, linear
from isobit.ops.portable.samples import check_rows
from isobit.ops.portable.sums import round_once
from isobit.ops.share import check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.tensor.parallel_linear import ParallelLinear
from isobit.parallel.tensor.parameter_grads import bias_grad, samples_of, weight_grad
from isobit.parallel.tensor.shard import split_module
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tp_group: TensorParallelGroup,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Compute this rank's outputs of `isobit.linear`, with the bits of the unsplit operator.

    Args:
        x: The input, on every rank. # [..., K]
        weight: This rank's rows. # [N/P, K]
        bias: This rank's elements, or None. # [N/P]
        tp_group: The P ranks; P must divide the segments of N.
        samples: Which rows of x belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        This rank's outputs. # [..., N/P]
    """
    return column_linear_group(
        x, (weight,), (bias,), groups=tp_group.size, tp_group=tp_group, samples=samples
    )[0]


def column_linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    groups: int,
    tp_group: TensorParallelGroup,
    samples: Samples | Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute this rank's outputs of `isobit.linear_group`: several linears of one input.

    dX of all the linears is one sum, so that one all-reduce suffices.

    Args:
        x: The input, on every rank. # [..., K]
        weights: This rank's rows of each weight. # [N_i/P, K]
        biases: This rank's elements of each bias, or None. # [N_i/P]
        groups: The number of groups of the unsplit operator; each rank has whole groups.
        tp_group: The P ranks.
        samples: Which rows of x belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        This rank's outputs of each linear. # [..., N_i/P]

    Raises:
        ArgumentError: There is no weight, or not one bias per weight.
        CutError: The number of ranks does not divide the groups.
    """
    given = tuple(biases) if biases is not None else (None,) * len(weights)
    check_counts(len(weights), len(given), groups, tp_group.size)
    x, *cast = cast_for_autocast(x, *weights, *given)
    weights, given = cast[: len(weights)], tuple(cast[len(weights) :])
    for weight, bias in zip(weights, given, strict=True):
        check_tensors(x=x, weight=weight, bias=bias)
        check_linear(x, weight, bias)
        check_groups(weight, groups // tp_group.size)
    known = samples_of(samples, x)
    check_rows(known, x)
    check_share(known, *weights, *given)
    cut = Cut(sum(len(w) for w in weights) * tp_group.size, tp_group.size, tp_group.rank)
    call = Call(tp_group, known, cut, groups // tp_group.size, len(weights))
    outputs: tuple[Tensor, ...] = ColumnLinear.apply(x, call, *weights, *given)  # type: ignore[no-untyped-call]
    return outputs


def check_counts(weights: int, biases: int, groups: int, ranks: int) -> None:
    """Require one bias per weight, and whole groups on each rank."""
    if biases != weights or not weights:
        raise ArgumentError(
            expected="one or more weights, and a bias or None for each",
            received=f"{weights} weights and {biases} biases",
            remedy="leave biases out where no layer has one",
        )
    if groups < 1 or groups % ranks:
        raise CutError(
            expected=f"whole groups on each rank: a number of ranks that divides {groups}",
            received=f"{ranks} ranks",
            remedy="use no more ranks than there are key heads, or shares of gate and up",
        )


@dataclass(frozen=True)
class Call:
    """What the backward needs besides tensors."""

    tp_group: TensorParallelGroup
    samples: Samples
    cut: Cut  # this rank's outputs among all outputs of all linears
    groups: int  # on this rank
    count: int  # of linears


class ColumnLinear(torch.autograd.Function):
    """Computes outputs locally; sums dX over all ranks along the tree, then rounds it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Any) -> tuple[Tensor, ...]:
        """Compute this rank's outputs [..., N_i/P]."""
        weights, biases = parameters[: call.count], parameters[call.count :]
        ctx.save_for_backward(x, *weights)
        ctx.call, ctx.has_bias = call, [bias is not None for bias in biases]
        ctx.share = share_in_force()
        return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum dX [..., K] over ranks; dW [N_i/P, K] and db [N_i/P] are local."""
        x, *weights = ctx.saved_tensors
        call: Call = ctx.call
        if torch.is_grad_enabled():
            refuse_second_order("parallel.column_linear")()
        want, after = ctx.needs_input_grad, 2 + call.count
        # dX travels between ranks while the parameters' gradients, which are local, are computed.
        finish = start_input_grad(grads, weights, call) if want[0] else None
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


def start_input_grad(
    grads: Sequence[Tensor], weights: Sequence[Tensor], call: Call
) -> Callable[[], Tensor]:
    """Start the sum dX over the ranks; call the returned function to wait for dX, rounded once."""
    total = partial.group_input_grad(grads, weights, call.groups, call.cut).values[0]
    wait = call.tp_group.start_all_reduce(total)

    def finish() -> Tensor:
        wait()
        return round_once(total, grads[0].dtype)

    return finish


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose N rows are split over P ranks; each rank computes N/P outputs.

    `out_features` stays that of the whole layer. Arguments: see `ParallelLinear`.

    Example:
        On one rank it is the layer itself; under `torchrun`, pass `mesh["tp"]`.

        >>> import torch
        >>> import isobit
        >>> from isobit.parallel import ColumnParallelLinear
        >>> whole = isobit.nn.Linear(64, 64)
        >>> split = ColumnParallelLinear.from_linear(whole, mesh=None)
        >>> x = torch.randn(2, 3, 64)
        >>> isobit.bits.equal(split(x), whole(x))
        True
    """

    def split(self, tp_group: TensorParallelGroup) -> None:
        """Keep this rank's rows of the weight and the bias."""
        Cut(self.out_features, tp_group.size, tp_group.rank)
        axes = {name: 0 for name in ("weight", "bias") if getattr(self, name) is not None}
        split_module(self, axes, tp_group)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute this rank's outputs [..., N/P] of an input [..., K] that every rank has."""
        return column_linear(input, self.weight, self.bias, tp_group=self.tp_group, samples=samples)
