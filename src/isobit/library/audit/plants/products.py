"""Planted products and sums: another order of addition by rows, by tail, or by batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from isobit.auditing.records import ERROR
from isobit.library.audit.plants.plant import (
    WIDTH,
    Plant,
    hidden,
    operator,
    planted_in_net,
    rows_by_outputs,
)

# Sums in a stated order, made of elementwise additions: their bits depend on nothing but the order.


def chain(terms: Tensor) -> Tensor:
    """Add along the last axis from left to right."""
    total = terms[..., 0]
    for at in range(1, terms.shape[-1]):
        total = total + terms[..., at]
    return total.clone()


def backwards(terms: Tensor) -> Tensor:
    """Add along the last axis from right to left."""
    return chain(terms.flip(-1))


def pairwise(terms: Tensor) -> Tensor:
    """Add along the last axis by halves: neighbours first."""
    while terms.shape[-1] > 1:
        odd = terms[..., -1:] if terms.shape[-1] % 2 else terms[..., :0]
        even = terms.shape[-1] - odd.shape[-1]
        terms = torch.cat([terms[..., 0:even:2] + terms[..., 1:even:2], odd], -1)
    return terms[..., 0].clone()


def in_blocks(terms: Tensor, size: int) -> Tensor:
    """Add blocks of `size` terms from left to right, then the sums of the blocks."""
    parts = [chain(block) for block in torch.split(terms, size, -1)]
    return chain(torch.stack(parts, -1))


def in_parts(terms: Tensor, parts: int) -> Tensor:
    """Add `parts` parts of equal size, as split-K does, then their sums."""
    return in_blocks(terms, -(-terms.shape[-1] // parts))


def in_lanes(terms: Tensor, lanes: int) -> Tensor:
    """Add every `lanes`-th term into one accumulator per lane, then add the accumulators."""
    return chain(torch.stack([chain(terms[..., lane::lanes]) for lane in range(lanes)], -1))


def shuffled(terms: Tensor, seed: int) -> Tensor:
    """Add in an order drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(terms.shape[-1], generator=generator)
    return chain(terms[..., places.to(terms.device)])


def fused(left: Tensor, right: Tensor) -> Tensor:
    """Add products from left to right, each product unrounded as a fused multiply-add leaves it."""
    total = torch.zeros_like(left[..., 0] * right[..., 0])
    for at in range(left.shape[-1]):
        exact = left[..., at].double() * right[..., at].double()
        total = (total.double() + exact).to(total.dtype)
    return total


def terms_of(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products of x [..., K] and weight [N, K] as [..., N, K], not yet added."""
    return x[..., None, :] * weight


def running(x: Tensor, block: int) -> Tensor:
    """Return cumulative sums along the last axis: inside blocks first, then plus the sum of all blocks before."""
    done: list[Tensor] = []
    before = torch.zeros_like(x[..., 0])
    for part in torch.split(x, block, -1):
        total = torch.zeros_like(before)
        for at in range(part.shape[-1]):
            total = total + part[..., at]
            done.append(before + total)
        before = before + total
    return torch.stack(done, -1)


MANY = 16  # rows from which a planted operator takes another path; a sample has fewer


def rows_of(x: Tensor) -> int:
    """Return how many rows x [..., K] has."""
    return x.shape[:-1].numel()


def chained(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in one order, whatever the rows."""
    return chain(terms_of(x, weight))


@operator("split_k", rows_by_outputs)
def split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Split K in four where rows are few, to keep all cores busy."""
    terms = terms_of(x, weight)
    return chain(terms) if rows_of(x) > MANY else in_parts(terms, 4)


@operator("block_size", rows_by_outputs)
def block_size(x: Tensor, weight: Tensor) -> Tensor:
    """Choose the size of a block by rows."""
    return in_blocks(terms_of(x, weight), 16 if rows_of(x) > MANY else 4)


@operator("tail_rows", rows_by_outputs)
def tail_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the last rows, which do not fill a tile of eight, in another order."""
    terms = terms_of(x.reshape(-1, x.shape[-1]), weight)
    full = len(terms) // 8 * 8
    y = torch.cat([in_lanes(terms[:full], 8), chain(terms[full:])])
    return y.reshape(*x.shape[:-1], -1)


@operator("bf16_accumulator", rows_by_outputs)
def bf16_accumulator(x: Tensor, weight: Tensor) -> Tensor:
    """Add in bf16 where rows are many."""
    terms = terms_of(x, weight)
    return chain(terms.bfloat16()).to(x.dtype) if rows_of(x) > MANY else chain(terms)


@operator("fma_for_even", rows_by_outputs)
def fma_for_even(x: Tensor, weight: Tensor) -> Tensor:
    """Use fused multiply-adds where the number of samples is even."""
    if len(x) % 2:
        return chained(x, weight)
    return fused(x[..., None, :].expand(*x.shape[:-1], *weight.shape), weight)


def row_sum(x: Tensor) -> Tensor:
    """Add each row in one order, and subtract it."""
    return x - chain(x)[..., None]


@operator("chain_or_pairwise")
def chain_or_pairwise(x: Tensor) -> Tensor:
    """Add each row as a chain or by halves, by the number of samples."""
    total = pairwise(x) if len(x) > 1 else chain(x)
    return x - total[..., None]


@operator("blocked_cumsum")
def blocked_cumsum(x: Tensor) -> Tensor:
    """Add cumulatively in blocks where rows are many."""
    return running(x, 8 if rows_of(x) > MANY else x.shape[-1])


def kernel_of(weight: Tensor) -> Tensor:
    """Return weight [N, 3 K] as taps [N, 3, K]."""
    return weight.reshape(len(weight), 3, -1)


def convolution_terms(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products of a causal convolution over three tokens, [..., N, 3, K]."""
    shifted = [torch.nn.functional.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in (2, 1, 0)]
    return torch.stack(shifted, -2)[..., None, :, :] * kernel_of(weight)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve, taps first."""
    return chain(convolution_terms(x, weight).transpose(-1, -2).flatten(-2))


@operator("convolution", rows_by_outputs)
def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve by another algorithm where samples are many: channels first."""
    if len(x) <= 4:
        return convolved(x, weight)
    return chain(convolution_terms(x, weight).flatten(-2))


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
    planted_in_net("blocked_cumsum", blocked_cumsum, partial(running, block=WIDTH)),
    planted_in_net("convolution", convolution, convolved, weight=(8, 3 * WIDTH)),
    planted_in_net("index_add", index_add, binned),
    planted_in_net("scaled_twice", scaled_twice, lambda x: x * 0.1 * 0.7),
    planted_in_net(
        "tail_exp", partial(bounded, tail_exp), partial(bounded, torch.exp), inputs=few_tokens
    ),
)
