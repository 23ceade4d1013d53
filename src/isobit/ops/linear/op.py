"""The linear operator: the public function, its torch operators and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.foundation.machine import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.arguments import WITH_GPU, cast_for_autocast, check_tensors, refuse_shape
from isobit.ops.gpu import executors
from isobit.ops.linear import portable
from isobit.ops.portable.samples import describe, whole_samples
from isobit.ops.registration import declare, launch, portable_operator, register_operator
from isobit.ops.share import as_partial, described_dtype, share_in_force
from isobit.order.samples import Samples


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Linear layer `x @ weight.T + bias` that does not depend on batch size, padding, threads or micro-batches.

    Each row of the result depends on that row of `x`, the weight and the bias. The gradients of weight and bias depend
    on the samples of the global batch, and not on how the batch is padded, packed or cut into micro-batches.

    Args:
        x: Input of shape [..., K], in fp32, bf16 or fp16. Products are summed in fp32 and rounded once.
        weight: Shape [N, K], in the dtype of x.
        bias: Shape [N], in the dtype of x.
        samples: The rows of each sample, as `Samples` or cumulative lengths (`cu_seqlens`). By default x [B, T, K] is
            B samples and x [T, K] is one.

    Returns:
        Tensor of shape [..., N] in the dtype of x.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.

    Example:
        >>> weight, x = torch.randn(32, 64), torch.randn(8, 64)
        >>> torch.equal(isobit.linear(x, weight)[:1], isobit.linear(x[:1], weight))
        True
    """
    return linear_with_packed(x, weight, bias, samples, None)


def linear_with_packed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    samples: Samples | Tensor | None,
    packed: Tensor | None,
) -> Tensor:
    """Compute `linear` with a packed form of the weight that is known to be current, or None."""
    x, weight, bias = cast_for_autocast(x, weight, bias)
    check_tensors(WITH_GPU, x=x, weight=weight, bias=bias)
    check_linear(x, weight, bias)
    spans, of = describe(samples, x, weight, bias)
    given = (x, weight, bias, spans, packed, of)
    return launch("linear", lambda x: sizes_of(x, weight), *given)  # type: ignore[no-any-return]


def sizes_of(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Return (rows, K, N), the sizes under which launches are recorded."""
    return (x.shape[:-1].numel(), weight.shape[1], weight.shape[0])


def linear_fp32(x: Tensor, weight: Tensor, packed: Tensor | None = None) -> Tensor:
    """Return x @ weight.T before it is rounded to the dtype of x, without a gradient: the logits of linear_logprob.

    `packed` is a packed form of the weight that is known to be current. It is read where the engine computes in fp32,
    which has x in fp32 and rounds nothing; an engine of pairs in bf16 reads the weight itself.
    """
    check_tensors(WITH_GPU, x=x, weight=weight)
    check_linear(x, weight, None)
    if executors.is_asked_for((x, weight)):
        return launch("linear_fp32", sizes_of(x, weight), x.detach(), weight.detach())  # type: ignore[no-any-return]
    if dispatch.is_native(x.dtype):
        if packed is not None and packed.dtype == torch.float32:
            wide = x.detach().float()
            return torch.ops.isobit.linear(wide, weight.detach(), None, None, packed)  # type: ignore[no-any-return]
        return torch.ops.isobit.linear_roots(x.detach(), weight.detach(), x.shape[-1], 0)[0]  # type: ignore[no-any-return]
    total = keeping_subnormals(portable.linear_fp32)(x, weight)
    return total.reshape(*x.shape[:-1], weight.shape[0])


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless x is [..., K], weight [N, K] and bias [N]."""
    if weight.dim() != 2:
        refuse_shape("weight", weight, "[N, K]", "pass a matrix, outputs first")
    outputs, inputs = weight.shape
    if not x.dim() or x.shape[-1] != inputs:
        expected = f"[..., {inputs}], as weight is {[outputs, inputs]}"
        refuse_shape("x", x, expected, "make the last axis of x and of weight the same")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != outputs):
        refuse_shape("bias", bias, f"[{outputs}]", "pass one bias per row of weight")


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, spans, _, ctx.of = inputs
    ctx.save_for_backward(x, weight, spans)
    ctx.has_bias, ctx.share = bias is not None, share_in_force()


def backward_with(prefix: str) -> Any:
    """Return the backward that calls the operators `isobit::<prefix>_{input,weight,bias}_grad`."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, spans = ctx.saved_tensors
        ops, want, share = torch.ops.isobit, ctx.needs_input_grad, ctx.share
        weight_grad, bias_grad = (
            getattr(ops, f"{prefix}_{kind}_grad") for kind in ("weight", "bias")
        )
        return (
            getattr(ops, f"{prefix}_input_grad")(grad, weight) if want[0] else None,
            as_partial(weight_grad(grad, x, spans, ctx.of), share) if want[1] else None,
            as_partial(bias_grad(grad, spans, ctx.of), share) if ctx.has_bias and want[2] else None,
            None,
            None,
            None,
        )

    return backward


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def empty_gradient(
        grad: Tensor, shape: tuple[int, ...], spans: Tensor | None, of: int
    ) -> Tensor:
        return grad.new_empty(shape, dtype=described_dtype(grad.dtype, spans, of))

    fakes: dict[str, Callable[..., Tensor]] = {
        "": lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])),
        "_input_grad": lambda grad, weight: grad.new_empty((*grad.shape[:-1], weight.shape[1])),
        "_weight_grad": lambda grad, x, spans, of=0: empty_gradient(
            grad, (grad.shape[-1], x.shape[-1]), spans, of
        ),
        "_bias_grad": lambda grad, spans, of=0: empty_gradient(grad, (grad.shape[-1],), spans, of),
    }
    for suffix, fake in fakes.items():
        formulas = () if suffix else (backward_with(prefix), setup_context)
        register_operator("linear", f"{prefix}{suffix}", fake, *formulas)


@portable_operator("portable_linear")
def portable_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Tensor | None,
    packed: Tensor | None = None,
    of: int = 0,
) -> Tensor:
    return portable.linear(x, weight, bias)


@portable_operator("portable_linear_input_grad")
def portable_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return portable.input_grad(grad, weight)


@portable_operator("portable_linear_weight_grad")
def portable_weight_grad(grad: Tensor, x: Tensor, spans: Tensor | None, of: int = 0) -> Tensor:
    return portable.weight_grad(grad, x, whole_samples(grad, spans, of))


@portable_operator("portable_linear_bias_grad")
def portable_bias_grad(grad: Tensor, spans: Tensor | None, of: int = 0) -> Tensor:
    return portable.bias_grad(grad, whole_samples(grad, spans, of))


def register_fp32(name: str) -> None:
    """Register the shape of sums before rounding; they have no gradient."""

    def fake(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)

    register_operator("linear_fp32", name, fake)


declare("linear", register_formulas, triton="isobit.ops.linear.triton")
executors.declare_triton("linear_fp32", register_fp32, "isobit.ops.linear.triton")
