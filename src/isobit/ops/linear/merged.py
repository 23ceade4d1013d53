"""Linear layers over weights with merged adapters: forward as a plain layer's, gradients to the adapters.

[Note: merged adapters] merged = round(W + s₁·B₁A₁ + s₂·B₂A₂ + …): the products and the sum in fp32, B A in the order of
`isobit.linear`, one rounding to the dtype of W. W is read and never written. The forward is that of a plain layer with
the merged weight, so that a server which was given the merged weights computes the same bits. The gradients are those
of adapters next to the weight: with g the gradient of the output, dB = s·gᵀ(A x) and dA = (s·g B)ᵀ x, in fp32. Each is
one sum over tokens, as the gradient of any linear layer is; Bᵀ(gᵀx), the derivative through the merged weight, would be
a product of that sum, which micro-batches could not be added up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import WITH_GPU, cast_for_autocast, check_tensors, refuse_shape
from isobit.ops.derivatives import (
    check_derivatives,
    refuse_forward_mode,
    refuse_second_order,
    refuse_vmap,
)
from isobit.ops.linear.group import check_groups, interleave, prefix_of
from isobit.ops.linear.op import check_linear, linear, sizes_of
from isobit.ops.portable.samples import describe
from isobit.ops.registration import launch
from isobit.ops.share import accumulation_dtype, as_partial, share_in_force
from isobit.order.samples import Samples


class Adapter(NamedTuple):
    """A low-rank addition to a weight [N, K]: scale · (b a), and scale · bias to the layer's bias.

    Attributes:
        a: Shape [r, K].
        b: Shape [N, r].
        scale: The factor.
        bias: Shape [N], or None.
    """

    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None = None


class MergedLayer(NamedTuple):
    """A linear layer and the adapters that are merged into it, in the order of addition."""

    weight: Tensor
    bias: Tensor | None
    adapters: tuple[Adapter, ...]


@torch.no_grad()
def merge_weight(weight: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """Return round(W + s₁·B₁A₁ + …) in the dtype of W, which is not written; see [Note: merged adapters].

    Args:
        weight: Shape [N, K].
        adapters: Those to merge, in the order of addition.

    Returns:
        A new tensor [N, K]; the weight itself if there are no adapters.

    Raises:
        ArgumentError: If shapes do not fit together.
    """
    if not adapters:
        return weight
    wide = accumulation_dtype(weight.dtype)
    total = weight.to(wide)
    with torch.autocast(weight.device.type, enabled=False):
        for adapter in adapters:
            check_adapter(weight, adapter)
            product = linear(adapter.b.to(wide), adapter.a.to(wide).t().contiguous())
            total = total + product * adapter.scale
    return total.to(weight.dtype)


@torch.no_grad()
def merge_bias(bias: Tensor | None, adapters: Sequence[Adapter]) -> Tensor | None:
    """Return round(bias + s₁·bias₁ + …) in the dtype of the bias.

    Raises:
        ArgumentError: If an adapter has a bias, and the layer has none to merge it into.
    """
    added = [adapter for adapter in adapters if adapter.bias is not None]
    if not added:
        return bias
    if bias is None:
        raise ArgumentError(
            expected="a layer with a bias, to merge the bias of an adapter into",
            received="a layer without one (lora_bias=True)",
            remedy="train this adapter next to the weight, adapters='beside', or set lora_bias=False",
        )
    total = bias.to(accumulation_dtype(bias.dtype))
    for adapter in added:
        total = total + adapter.bias.to(total.dtype) * adapter.scale  # type: ignore[union-attr]
    return total.to(bias.dtype)


def merged_linear_group(
    x: Tensor,
    layers: Sequence[MergedLayer],
    *,
    groups: int = 1,
    samples: Samples | Tensor | None = None,
    merged: Sequence[tuple[Tensor, Tensor | None]] | None = None,
) -> tuple[Tensor, ...]:
    """Compute linear layers of one input with their adapters merged; see [Note: merged adapters].

    Args:
        x: Input of shape [..., K].
        layers: Weights, biases and adapters.
        groups: See isobit.linear_group.
        samples: See isobit.linear.
        merged: Weights and biases that `merge_weight` and `merge_bias` returned for these layers, if they are known.

    Returns:
        One tensor [..., N_i] per layer.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.
    """
    if merged is None:
        merged = [
            (merge_weight(each.weight, each.adapters), merge_bias(each.bias, each.adapters))
            for each in layers
        ]
    x, *cast = cast_for_autocast(x, *(tensor for pair in merged for tensor in pair))
    merged = list(zip(cast[::2], cast[1::2], strict=True))
    for weight, bias in merged:
        check_tensors(WITH_GPU, x=x, weight=weight, bias=bias)
        check_linear(x, weight, bias)
        check_groups(weight, groups)
    parameters = [tensor for layer in layers for tensor in tensors_of(layer)]
    spans, of = describe(samples, x, *parameters)
    outputs = tuple(
        launch("linear", sizes_of(x, w), x.detach(), w, b, spans, None, of) for w, b in merged
    )
    if not torch.is_grad_enabled():
        return outputs
    shapes = tuple(len(layer.adapters) for layer in layers)
    scales = tuple(adapter.scale for layer in layers for adapter in layer.adapters)
    check_derivatives("linear_group", (x, *parameters))
    return _Merged.apply(x, outputs, spans, of, groups, shapes, scales, *parameters)  # type: ignore[no-any-return, no-untyped-call]


def tensors_of(layer: MergedLayer) -> list[Tensor | None]:
    """Return weight, bias, and a, b, bias of each adapter."""
    own: list[Tensor | None] = [layer.weight, layer.bias]
    for adapter in layer.adapters:
        own += [adapter.a, adapter.b, adapter.bias]
    return own


def layers_of(
    tensors: Sequence[Tensor | None], shapes: tuple[int, ...], scales: tuple[float, ...]
) -> list[MergedLayer]:
    """Put layers together again from `tensors_of` each."""
    layers, left, factors = [], iter(tensors), iter(scales)
    for count in shapes:
        weight, bias = next(left), next(left)
        adapters = []
        for _ in range(count):
            a, b, own = next(left), next(left), next(left)
            adapters.append(Adapter(a, b, next(factors), own))  # type: ignore[arg-type]
        layers.append(MergedLayer(weight, bias, tuple(adapters)))  # type: ignore[arg-type]
    return layers


class _Merged(torch.autograd.Function):
    """Outputs that are known, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        outputs: tuple[Tensor, ...],
        spans: Tensor | None,
        of: int,
        groups: int,
        shapes: tuple[int, ...],
        scales: tuple[float, ...],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, spans, *parameters)
        ctx.of, ctx.groups, ctx.shapes, ctx.scales = of, groups, shapes, scales
        ctx.share = share_in_force()
        return tuple(output.view_as(output) for output in outputs)

    jvp = staticmethod(refuse_forward_mode("linear_group"))
    vmap = staticmethod(refuse_vmap("linear_group"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, spans, *parameters = ctx.saved_tensors
        check_derivatives("linear_group", grads)
        if any(grad.requires_grad for grad in grads) and torch.is_grad_enabled():
            refuse_second_order("linear_group")()
        layers = layers_of(parameters, ctx.shapes, ctx.scales)
        want = ctx.needs_input_grad
        found = GradientsOf(x, spans, ctx.of, ctx.share)
        own = [
            grad
            for layer, grad in zip(layers, grads, strict=True)
            for grad in found.of_layer(layer, grad)
        ]
        return (
            input_grad(grads, layers, ctx.groups) if want[0] else None,
            *[None] * 6,
            *[take() if wanted else None for take, wanted in zip(own, want[7:], strict=True)],
        )


class GradientsOf:
    """Gradients of the parameters of a call, each a sum over its samples, computed when it is asked for."""

    def __init__(self, x: Tensor, spans: Tensor | None, of: int, share: Any) -> None:
        self.x, self.spans, self.of, self.share = x, spans, of, share
        self.wide_x = x.to(accumulation_dtype(x.dtype))

    def of_layer(self, layer: MergedLayer, grad: Tensor) -> list[Any]:
        """Return a function per tensor of `tensors_of(layer)`."""
        wide = grad.to(self.wide_x.dtype)
        found: list[Any] = [
            lambda: self.weight(grad, self.x, layer.weight.dtype),
            lambda: self.bias(grad, layer.bias.dtype),  # type: ignore[union-attr]
        ]
        for adapter in layer.adapters:
            found += self.of_adapter(adapter, wide * adapter.scale)
        return found

    def of_adapter(self, adapter: Adapter, grad: Tensor) -> list[Any]:
        """Return functions for a, b and the bias; `grad` is that of B(A x)."""
        a, b = adapter.a.to(grad.dtype), adapter.b.to(grad.dtype)

        def of_a() -> Tensor:
            low = getattr(torch.ops.isobit, f"{prefix_of(grad)}_input_grad")(grad, b)
            return self.weight(low, self.wide_x, adapter.a.dtype)

        return [
            of_a,
            lambda: self.weight(grad, self.low(a), adapter.b.dtype),
            lambda: self.bias(grad, adapter.bias.dtype),  # type: ignore[union-attr]
        ]

    def low(self, a: Tensor) -> Tensor:
        """Return A x, as the forward of an adapter next to the weight computes it."""
        with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
            return linear(self.wide_x, a)

    def weight(self, grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return gradᵀ x over the samples: rounded to the parameter's dtype if it is the whole batch's."""
        function = getattr(torch.ops.isobit, f"{prefix_of(grad)}_weight_grad")
        return self.settled(function(grad, x, self.spans, self.of), dtype)

    def bias(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of grad over the samples."""
        function = getattr(torch.ops.isobit, f"{prefix_of(grad)}_bias_grad")
        return self.settled(function(grad, self.spans, self.of), dtype)

    def settled(self, found: Tensor, dtype: torch.dtype) -> Tensor:
        is_part = self.spans is not None and self.of not in (0, len(self.spans))
        return as_partial(found if is_part else found.to(dtype), self.share)


def input_grad(grads: Sequence[Tensor], layers: Sequence[MergedLayer], groups: int) -> Tensor:
    """Return the gradient of x: one sum over the rows of all merged weights, which are computed again."""
    weights = [merge_weight(layer.weight, layer.adapters).to(grads[0].dtype) for layer in layers]
    prefix, ops = prefix_of(grads[0]), torch.ops.isobit
    if prefix == "linear":
        return ops.linear_group_input_grad(list(grads), weights, groups)  # type: ignore[no-any-return]
    joined = interleave(grads, -1, groups), interleave(weights, 0, groups)
    return getattr(ops, f"{prefix}_input_grad")(*joined)  # type: ignore[no-any-return]


def check_adapter(weight: Tensor, adapter: Adapter) -> None:
    """Raise unless b a has the shape of the weight."""
    outputs, inputs = weight.shape
    if adapter.a.dim() != 2 or adapter.a.shape[1] != inputs:
        refuse_shape("a", adapter.a, f"[r, {inputs}]", "pass lora_A.weight of this layer")
    if adapter.b.dim() != 2 or adapter.b.shape != (outputs, adapter.a.shape[0]):
        expected = f"[{outputs}, {adapter.a.shape[0]}]"
        refuse_shape("b", adapter.b, expected, "pass lora_B.weight of this layer")
