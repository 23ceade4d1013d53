"""Linear layers that are split over ranks: column-parallel by outputs, row-parallel by inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import ArgumentError, CutError
from isobit.foundation import launches
from isobit.ops import dispatch
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
from isobit.parallel.collectives.elementwise_add import add_to_rows
from isobit.parallel.tensor.shard import split_module, tp_group_of
from isobit.parallel.tensor.tensor_parallel_group import (
    TensorParallelGroup,
    bias_grad,
    operator,
    samples_of,
    weight_grad,
)

# The base class of column-parallel and row-parallel linear layers.

Layer = TypeVar("Layer", bound="ParallelLinear")


class ParallelLinear(nn.Linear):
    """A linear layer that is split over ranks. Subclasses say along which axis.

    Args:
        in_features: Of the unsplit layer.
        out_features: Of the unsplit layer.
        bias: Whether the layer has a bias.
        mesh: A mesh of one axis, a process group, or None for one rank alone.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        CutError: The layer cannot be split over so many ranks on segment edges.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh | TensorParallelGroup | None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialize the whole layer and keep this rank's part."""
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.split(TensorParallelGroup.of(mesh))

    @classmethod
    def from_linear(
        cls: type[Layer], module: nn.Linear, mesh: DeviceMesh | TensorParallelGroup | None
    ) -> Layer:
        """Return this rank's part of a whole layer, which is not changed."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = module.in_features, module.out_features
        made.weight, made.bias = module.weight, module.bias
        made.split(TensorParallelGroup.of(mesh))
        if made.bias is module.bias and made.bias is not None:  # not split: a copy of its own
            made.bias = nn.Parameter(
                module.bias.detach().clone(), requires_grad=module.bias.requires_grad
            )
        return made.train(module.training)

    def split(self, tp_group: TensorParallelGroup) -> None:
        """Keep this rank's part of the parameters; `in_features` and `out_features` stay."""
        raise NotImplementedError

    @property
    def tp_group(self) -> TensorParallelGroup:
        """The ranks over which this layer is split."""
        tp_group = tp_group_of(self)
        assert tp_group is not None
        return tp_group


# The column-parallel linear layer: each rank computes a run of the outputs.
#
# The forward needs no communication. The input's gradient dX is one sum over all ranks' outputs.


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


# The row-parallel linear layer: each rank has a run of the inputs.
#
# The output is one sum over all ranks' inputs. The backward needs no communication.


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
