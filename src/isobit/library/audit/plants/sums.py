"""Sums in a stated order, made of elementwise additions: their bits depend on nothing but the order."""

from __future__ import annotations

import torch
from torch import Tensor


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
