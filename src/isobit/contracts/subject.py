"""What is judged: the sums of a linear layer, by one implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
class Subject:
    """One implementation of a linear layer, whole and in shares."""

    name: str
    output: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_grad: Callable[[Tensor, Tensor], Tensor]
    parameter_grads: Callable[[Tensor, Tensor, Samples], tuple[Tensor, Tensor]]
    accumulate: Callable[[Sequence[Share]], tuple[Tensor, Tensor]]
    cut_output: Callable[[Tensor, Tensor, int], Tensor]
    cut_input_grad: Callable[[Tensor, Tensor, int], Tensor]
    decoder: Callable[[torch.nn.Linear], Callable[[Tensor], Tensor]]


# ---- ours: through autograd, so that what is judged is what a user gets ---------------------------------


def our_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    x = grad.new_zeros(*grad.shape[:-1], weight.shape[1], requires_grad=True)
    return torch.autograd.grad(linear(x, weight), x, grad)[0]


def our_parameter_grads(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    weight = x.new_zeros(grad.shape[-1], x.shape[-1], requires_grad=True)
    bias = x.new_zeros(grad.shape[-1], requires_grad=True)
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
    pieces = [partial.input_grad(part_of(grad, cut), part_of(weight.t(), cut).t(), cut) for cut in cuts]
    return partial.merge(pieces, dtype=grad.dtype)


def part_of(tensor: Tensor, cut: Cut) -> Tensor:
    """The share's run of the last axis."""
    return tensor[..., cut.start : cut.start + cut.length]


def our_decoder(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    ours = isobit.nn.Linear.sharing(layer)
    isobit.freeze(ours)
    return ours


OURS = Subject(
    "isobit",
    linear,
    our_input_grad,
    our_parameter_grads,
    our_accumulate,
    our_cut_output,
    our_cut_input_grad,
    our_decoder,
)


# ---- the control: what stock PyTorch does for the same requests -----------------------------------------


def stock_parameter_grads(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    real = torch.zeros(len(rows), 1, dtype=torch.bool)
    for start, length in samples.spans:
        real[start : start + length] = True
    rows = torch.where(real, rows, 0)  # as a masked loss leaves padding
    return rows.t() @ torch.where(real, inputs, 0), rows.sum(0)


def stock_accumulate(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
    weight, bias = stock_parameter_grads(*shares[0])
    for share in shares[1:]:
        more = stock_parameter_grads(*share)
        weight, bias = weight + more[0], bias + more[1]
    return weight, bias


def stock_cut_output(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
    pieces = [torch.nn.functional.linear(a, b) for a, b in pairs]
    return torch.stack(pieces).sum(0)


def stock_cut_input_grad(grad: Tensor, weight: Tensor, parts: int) -> Tensor:
    pairs = zip(grad.chunk(parts, -1), weight.chunk(parts, 0), strict=True)
    return torch.stack([a @ b for a, b in pairs]).sum(0)


STOCK = Subject(
    "stock",
    torch.nn.functional.linear,
    torch.matmul,
    stock_parameter_grads,
    stock_accumulate,
    stock_cut_output,
    stock_cut_input_grad,
    lambda layer: layer,
)
