"""Wrong steps of AdamW, planted into adamw-kernel-v1."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.library.adamw.claims import (
    BETAS,
    COUNT,
    DECAY,
    EPS,
    RATE,
    formula,
    step_with,
    stepped,
)
from isobit.ops.adamw import portable
from isobit.ops.portable.sums import round_once
from isobit.optim import AdamW

NUMBERS = portable.numbers_of(RATE, BETAS, EPS, DECAY, COUNT)


def joined(like: Tensor, *results: Tensor) -> Tensor:
    """Return results side by side, each rounded once."""
    return torch.cat([round_once(result, like.dtype) for result in results], -1)


def moments(grad: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new mean and mean of squares in fp32, as the definition has them."""
    g, n = grad.float(), NUMBERS
    mean = first.float() * n.keep_mean + g * n.add_mean
    return mean, second.float().abs() * n.keep_square + (g * n.add_square) * g


def moved(p: Tensor, mean: Tensor, divisor: Tensor) -> Tensor:
    """Return the new parameter, as the definition has it."""
    return p.float() * NUMBERS.decay - (mean * NUMBERS.rate) / divisor


def fused_products(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Fuse products with sums, as a compiler does that may contract."""
    n, g, wide = NUMBERS, grad.float(), grad.double()
    keep, added = (float(torch.tensor(x)) for x in (n.keep_mean, n.add_mean))
    mean = (first.double() * keep + (wide * added).float().double()).float()
    scale = float(torch.tensor(n.keep_square))
    square = (second.double().abs() * scale + ((g * n.add_square) * g).double()).float()
    divisor = portable.exact_root(square) * n.spread + n.eps
    return joined(p, moved(p, mean, divisor), mean, square)


def approximate_root(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Take the square root by a reciprocal one, as a GPU's fast mode does."""
    mean, square = moments(grad, first, second)
    root = torch.where(square > 0, square * square.rsqrt(), square)
    return joined(p, moved(p, mean, root * NUMBERS.spread + EPS), mean, square)


def corrected_inside(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Correct the bias of the squares before the root, not after it."""
    mean, square = moments(grad, first, second)
    divisor = portable.exact_root(square / (1 - BETAS[1] ** COUNT)) + EPS
    return joined(p, moved(p, mean, divisor), mean, square)


def divided_first(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Divide the mean before it is multiplied by the rate."""
    mean, square = moments(grad, first, second)
    divisor = portable.exact_root(square) * NUMBERS.spread + EPS
    value = p.float() * NUMBERS.decay - (mean / divisor) * NUMBERS.rate
    return joined(p, value, mean, square)


def rounded_between(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Round the moments to their 16 bits before the parameter is computed from them."""
    mean, square = (t.to(p.dtype).float() for t in moments(grad, first, second))
    divisor = portable.exact_root(square) * NUMBERS.spread + EPS
    return joined(p, moved(p, mean, divisor), mean, square)


def corrected_late(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Correct the bias by the count before this step."""
    return step_with(AdamW, p, grad, first, second, COUNT - 1)


def eps_inside(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Divide by sqrt(v + eps) instead of sqrt(v) + eps."""
    (_, mean, square), _ = formula(p.float(), grad.float(), first.float(), second.float().abs())
    spread = (square / (1 - BETAS[1] ** COUNT) + EPS).sqrt()
    moved = p.float() * (1 - RATE * DECAY) - RATE / (1 - BETAS[0] ** COUNT) * mean / spread
    return torch.cat([moved, mean, square], -1).to(p.dtype)


def coupled(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Add the decay to the gradient, as Adam with L2 does."""
    wide, added = p.float(), grad.float() + DECAY * p.float()
    (moved, *moments), _ = formula(wide, added, first.float(), second.float().abs())
    return torch.cat([moved + RATE * DECAY * wide, *moments], -1).to(p.dtype)


def normalised_apart(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Divide each piece's gradient by its own largest element."""
    largest = grad.detach().nan_to_num(0, 0, 0).abs().amax() if grad.numel() else 1.0
    return stepped(p, grad / (largest + 1.0), first, second)


def by_tails(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Compute the last elements, fewer than a vector, by another formula."""
    whole = stepped(p, grad, first, second)
    tail = whole.shape[-1] // 3 % 8
    whole[..., whole.shape[-1] // 3 - tail : whole.shape[-1] // 3] *= 1 + torch.finfo(p.dtype).eps
    return whole
