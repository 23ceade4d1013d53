"""The sums of a linear layer, whole and in shares: isobit's, and what any plain function makes of the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import isobit
from isobit.ops.linear import partial
from isobit.ops.linear.op import linear
from isobit.order.cut import Cut
from isobit.order.samples import Samples

# A share of a batch: (grad, x, samples).
Share = tuple[Tensor, Tensor, Samples]


@dataclass(frozen=True)
class LinearParts:
    """One implementation of a linear layer; called, it gives the output."""

    output: Callable[..., Tensor]
    input_grad: Callable[[Tensor, Tensor], Tensor]
    parameter_grads: Callable[[Tensor, Tensor, Samples], tuple[Tensor, Tensor]]
    accumulate: Callable[[Sequence[Share]], tuple[Tensor, Tensor]]
    cut_output: Callable[[Tensor, Tensor, int], Tensor]
    cut_input_grad: Callable[[Tensor, Tensor, int], Tensor]
    decoder: Callable[[torch.nn.Linear], Callable[[Tensor], Tensor]]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.output(x, weight, bias)


def parts_of(subject: Callable[..., Any]) -> LinearParts:
    """What a claim about shares judges: isobit's own shares for isobit.linear, plain ones for any other function."""
    if isinstance(subject, LinearParts):
        return subject
    return OURS if subject is linear else plain_parts(subject)


# ---- ours: through autograd, so that what is judged is what a user gets ---------------------------------


def our_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return input_grad_by(linear, grad, weight)


def our_parameter_grads(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    weight = x.new_zeros(grad.shape[-1], x.shape[-1], requires_grad=True)
    bias = x.new_zeros(grad.shape[-1], requires_grad=True)
    with torch.enable_grad():
        found = torch.autograd.grad(linear(x, weight, bias, samples=samples), (weight, bias), grad)
    return found[0], found[1]


def our_accumulate(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
    dtype = shares[0][0].dtype
    weights = [partial.weight_grad(*share) for share in shares]
    biases = [partial.bias_grad(grad, samples) for grad, _, samples in shares]
    return partial.merge(weights, dtype=dtype), partial.merge(biases, dtype=dtype)


def our_cut_output(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    cuts = [Cut(x.shape[-1], parts, i) for i in range(parts)]
    pieces = [partial.output(part_of(x, cut), part_of(weight, cut), cut) for cut in reversed(cuts)]
    return partial.merge(pieces, dtype=x.dtype)


def our_cut_input_grad(grad: Tensor, weight: Tensor, parts: int) -> Tensor:
    cuts = [Cut(grad.shape[-1], parts, i) for i in range(parts)]
    pieces = [
        partial.input_grad(part_of(grad, cut), part_of(weight.t(), cut).t(), cut) for cut in cuts
    ]
    return partial.merge(pieces, dtype=grad.dtype)


def part_of(tensor: Tensor, cut: Cut) -> Tensor:
    """The share's run of the last axis."""
    return tensor[..., cut.start : cut.start + cut.length]


def our_decoder(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    ours = isobit.nn.Linear.sharing(layer)
    isobit.freeze(ours)
    return ours


OURS = LinearParts(
    linear,
    our_input_grad,
    our_parameter_grads,
    our_accumulate,
    our_cut_output,
    our_cut_input_grad,
    our_decoder,
)


# ---- any other function: what people do with it for the same requests -----------------------------------


def input_grad_by(function: Callable[..., Tensor], grad: Tensor, weight: Tensor) -> Tensor:
    """By autograd."""
    x = grad.new_zeros(*grad.shape[:-1], weight.shape[1], requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(function(x, weight), x, grad)[0]


def plain_parts(function: Callable[..., Tensor]) -> LinearParts:
    """Padding zeroed, micro-batches and ranks added as they come."""

    def parameter_grads(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        real = torch.zeros(len(rows), 1, dtype=torch.bool)
        for start, length in samples.spans:
            real[start : start + length] = True
        rows, inputs = (
            torch.where(real, rows, 0),
            torch.where(real, inputs, 0),
        )  # as a masked loss leaves padding
        weight = x.new_zeros(grad.shape[-1], x.shape[-1], requires_grad=True)
        bias = x.new_zeros(grad.shape[-1], requires_grad=True)
        with torch.enable_grad():
            found = torch.autograd.grad(function(inputs, weight, bias), (weight, bias), rows)
        return found[0], found[1]

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

    def decoder(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: function(x, layer.weight)

    return LinearParts(
        function,
        lambda grad, weight: input_grad_by(function, grad, weight),
        parameter_grads,
        accumulate,
        cut_output,
        cut_input_grad,
        decoder,
    )
