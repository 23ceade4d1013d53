"""Everything a linear layer computes, whole and in shares: by isobit, and by any plain function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.library.gradients import gradients
from isobit.library.placements import is_real
from isobit.library.subjects import Subject
from isobit.nn.freezing import freeze
from isobit.nn.linear import Linear
from isobit.ops.linear import partial, portable
from isobit.ops.linear.op import linear
from isobit.ops.linear.targets import Decoder
from isobit.order.cut import Cut
from isobit.order.samples import Samples

Share = tuple[Tensor, Tensor, Samples]  # of a batch: (grad, x, samples)


@dataclass(frozen=True)
class LinearLayer:
    """One implementation of a linear layer."""

    output: Callable[..., Tensor]
    input_grad: Callable[[Tensor, Tensor], Tensor]
    parameter_grads: Callable[[Tensor, Tensor, Samples], tuple[Tensor, Tensor]]
    accumulate: Callable[[Sequence[Share]], tuple[Tensor, Tensor]]
    cut_output: Callable[[Tensor, Tensor, int], Tensor]
    cut_input_grad: Callable[[Tensor, Tensor, int], Tensor]
    decoder: Decoder

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output."""
        return self.output(x, weight, bias)


def portable_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the portable executor's result."""
    return portable.linear(x, weight, bias)


def layer_of(subject: Subject) -> LinearLayer:
    """Return isobit's implementation for isobit.linear, a plain one for any other function."""
    if isinstance(subject, LinearLayer):
        return subject
    return OURS if subject is linear else plain_layer(subject)


def grads_by(
    function: Subject, grad: Tensor, x: Tensor, samples: Samples | None = None
) -> tuple[Tensor, Tensor]:
    """Return dW and db by autograd."""
    parameters = x.new_zeros(grad.shape[-1], x.shape[-1]), x.new_zeros(grad.shape[-1])
    named = {} if samples is None else {"samples": samples}
    found = gradients(lambda weight, bias: function(x, weight, bias, **named), parameters, grad)
    return found[0], found[1]


def input_grad_by(function: Subject, grad: Tensor, weight: Tensor) -> Tensor:
    """Return dX by autograd."""
    x = grad.new_zeros(*grad.shape[:-1], weight.shape[1])
    return gradients(lambda x: function(x, weight), [x], grad)[0]


def our_accumulate(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
    """Merge the partial gradients of micro-batches by the tree over samples."""
    dtype = shares[0][0].dtype
    weights = [partial.weight_grad(*share) for share in shares]
    biases = [partial.bias_grad(grad, samples) for grad, _, samples in shares]
    return partial.merge(weights, dtype=dtype), partial.merge(biases, dtype=dtype)


def our_cut_output(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Merge the shares of y over K, the last rank's first."""
    cuts = [Cut(x.shape[-1], parts, i) for i in reversed(range(parts))]
    shares = [partial.output(share_of(x, cut), share_of(weight, cut), cut) for cut in cuts]
    return partial.merge(shares, dtype=x.dtype)


def our_cut_input_grad(grad: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Merge the shares of dX over N."""
    cuts = [Cut(grad.shape[-1], parts, i) for i in range(parts)]
    shares = [
        partial.input_grad(share_of(grad, cut), share_of(weight.t(), cut).t(), cut) for cut in cuts
    ]
    return partial.merge(shares, dtype=grad.dtype)


def share_of(tensor: Tensor, cut: Cut) -> Tensor:
    """Return the part of the last axis that one rank has."""
    return tensor[..., cut.start : cut.start + cut.length]


def our_decoder(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a frozen isobit.nn.Linear over the same parameters."""
    ours = Linear.sharing(layer)
    freeze(ours)
    return ours


# Through autograd, so that what a user gets is judged.
OURS = LinearLayer(
    linear,
    lambda grad, weight: input_grad_by(linear, grad, weight),
    lambda grad, x, samples: grads_by(linear, grad, x, samples),
    our_accumulate,
    our_cut_output,
    our_cut_input_grad,
    our_decoder,
)


def plain_layer(function: Subject) -> LinearLayer:
    """Return what people do with a function that has no shares: zero padding, add in order of arrival."""

    def parameter_grads(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        real = is_real(samples).unsqueeze(1)
        rows, inputs = (torch.where(real, t.reshape(-1, t.shape[-1]), 0) for t in (grad, x))
        return grads_by(function, rows, inputs)

    def accumulate(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
        weight, bias = parameter_grads(*shares[0])
        for share in shares[1:]:
            more = parameter_grads(*share)
            weight, bias = weight + more[0], bias + more[1]
        return weight, bias

    def cut_output(x: Tensor, weight: Tensor, parts: int) -> Tensor:
        pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
        return torch.stack([function(a, b) for a, b in pairs]).sum(0)

    def cut_input_grad(grad: Tensor, weight: Tensor, parts: int) -> Tensor:
        pairs = zip(grad.chunk(parts, -1), weight.chunk(parts, 0), strict=True)
        return torch.stack([input_grad_by(function, a, b) for a, b in pairs]).sum(0)

    return LinearLayer(
        function,
        lambda grad, weight: input_grad_by(function, grad, weight),
        parameter_grads,
        accumulate,
        cut_output,
        cut_input_grad,
        lambda layer: lambda x: function(x, layer.weight),
    )
