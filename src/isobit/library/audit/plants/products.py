"""Planted products and sums: another order of addition by rows, by tail, or by batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from isobit.auditing.records import ERROR
from isobit.library.audit.plants import sums
from isobit.library.audit.plants.plant import (
    WIDTH,
    Plant,
    hidden,
    operator,
    planted_in_net,
    rows_by_outputs,
)

MANY = 16  # rows from which a planted operator takes another path; a sample has fewer


def rows_of(x: Tensor) -> int:
    """Return how many rows x [..., K] has."""
    return x.shape[:-1].numel()


def chained(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in one order, whatever the rows."""
    return sums.chain(sums.terms_of(x, weight))


@operator("split_k", rows_by_outputs)
def split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Split K in four where rows are few, to keep all cores busy."""
    terms = sums.terms_of(x, weight)
    return sums.chain(terms) if rows_of(x) > MANY else sums.in_parts(terms, 4)


@operator("block_size", rows_by_outputs)
def block_size(x: Tensor, weight: Tensor) -> Tensor:
    """Choose the size of a block by rows."""
    return sums.in_blocks(sums.terms_of(x, weight), 16 if rows_of(x) > MANY else 4)


@operator("tail_rows", rows_by_outputs)
def tail_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the last rows, which do not fill a tile of eight, in another order."""
    terms = sums.terms_of(x.reshape(-1, x.shape[-1]), weight)
    full = len(terms) // 8 * 8
    y = torch.cat([sums.in_lanes(terms[:full], 8), sums.chain(terms[full:])])
    return y.reshape(*x.shape[:-1], -1)


@operator("bf16_accumulator", rows_by_outputs)
def bf16_accumulator(x: Tensor, weight: Tensor) -> Tensor:
    """Add in bf16 where rows are many."""
    terms = sums.terms_of(x, weight)
    return sums.chain(terms.bfloat16()).to(x.dtype) if rows_of(x) > MANY else sums.chain(terms)


@operator("fma_for_even", rows_by_outputs)
def fma_for_even(x: Tensor, weight: Tensor) -> Tensor:
    """Use fused multiply-adds where the number of samples is even."""
    if len(x) % 2:
        return chained(x, weight)
    return sums.fused(x[..., None, :].expand(*x.shape[:-1], *weight.shape), weight)


def row_sum(x: Tensor) -> Tensor:
    """Add each row in one order, and subtract it."""
    return x - sums.chain(x)[..., None]


@operator("chain_or_pairwise")
def chain_or_pairwise(x: Tensor) -> Tensor:
    """Add each row as a chain or by halves, by the number of samples."""
    total = sums.pairwise(x) if len(x) > 1 else sums.chain(x)
    return x - total[..., None]


@operator("blocked_cumsum")
def blocked_cumsum(x: Tensor) -> Tensor:
    """Add cumulatively in blocks where rows are many."""
    return sums.running(x, 8 if rows_of(x) > MANY else x.shape[-1])


def kernel_of(weight: Tensor) -> Tensor:
    """Return weight [N, 3 K] as taps [N, 3, K]."""
    return weight.reshape(len(weight), 3, -1)


def convolution_terms(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products of a causal convolution over three tokens, [..., N, 3, K]."""
    shifted = [torch.nn.functional.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in (2, 1, 0)]
    return torch.stack(shifted, -2)[..., None, :, :] * kernel_of(weight)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve, taps first."""
    return sums.chain(convolution_terms(x, weight).transpose(-1, -2).flatten(-2))


@operator("convolution", rows_by_outputs)
def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve by another algorithm where samples are many: channels first."""
    if len(x) <= 4:
        return convolved(x, weight)
    return sums.chain(convolution_terms(x, weight).flatten(-2))


def binned(x: Tensor, bins: int = 3, turned: bool = False) -> Tensor:
    """Add the tokens of a sample into bins, in their order or in the opposite one, and return each token's bin."""
    tokens = range(x.shape[1])
    total = x.new_zeros(len(x), bins, x.shape[-1])
    for at in reversed(tokens) if turned else tokens:
        total[:, at % bins] += x[:, at]
    return total[:, [at % bins for at in tokens]]


@operator("index_add")
def index_add(x: Tensor) -> Tensor:
    """Add tokens into bins from the last to the first where samples are many."""
    return binned(x, turned=len(x) > 2)


@operator("scaled_twice")
def scaled_twice(x: Tensor) -> Tensor:
    """Multiply by two factors, or by their product, by rows."""
    return x * (0.1 * 0.7) if rows_of(x) > MANY else (x * 0.1) * 0.7


@operator("tail_exp")
def tail_exp(x: Tensor) -> Tensor:
    """Compute exp by another formula where elements do not fill a vector of sixteen."""
    flat = x.reshape(-1)
    full = flat.numel() // 16 * 16
    tail = flat[full:]
    half = torch.exp(tail * 0.5)
    return torch.cat([torch.exp(flat[:full]), half * half]).reshape(x.shape)


def few_tokens() -> dict[str, Tensor]:
    """Return samples whose elements do not fill vectors."""
    return {"x": hidden(tokens=3, width=WIDTH)["x"]}


def bounded(function: object, x: Tensor) -> Tensor:
    """Apply a function to the first 9 of each row's features, bounded to [-2, 2]."""
    assert callable(function)
    y: Tensor = function(x[..., :9].clamp(-2.0, 2.0))
    return y


WEIGHT = (24, WIDTH)
PLANTS: tuple[Plant, ...] = (
    planted_in_net("split_k", split_k, chained, weight=WEIGHT),
    planted_in_net("block_size", block_size, chained, weight=WEIGHT),
    planted_in_net("tail_rows", tail_rows, chained, weight=WEIGHT),
    planted_in_net("bf16_accumulator", bf16_accumulator, chained, weight=WEIGHT, kind=ERROR),
    planted_in_net("fma_for_even", fma_for_even, chained, weight=WEIGHT),
    planted_in_net("chain_or_pairwise", chain_or_pairwise, row_sum),
    planted_in_net("blocked_cumsum", blocked_cumsum, partial(sums.running, block=WIDTH)),
    planted_in_net("convolution", convolution, convolved, weight=(8, 3 * WIDTH)),
    planted_in_net("index_add", index_add, binned),
    planted_in_net("scaled_twice", scaled_twice, lambda x: x * 0.1 * 0.7),
    planted_in_net(
        "tail_exp", partial(bounded, tail_exp), partial(bounded, torch.exp), inputs=few_tokens
    ),
)
