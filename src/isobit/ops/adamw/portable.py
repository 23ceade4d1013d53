"""The step of AdamW on the CPU: the operations of torch.optim.AdamW for one tensor, one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from isobit.ops.portable.rounding import settle_nans


class Numbers(NamedTuple):
    """The numbers of a step; those of one operation are computed in fp64 and used as fp32.

    Attributes:
        decay: What the parameter is multiplied by, 1 - lr · weight_decay.
        weight: What the gradient counts in the mean, 1 - beta1.
        keep: What the old mean of squares is multiplied by, beta2.
        added: What the gradient's square counts, 1 - beta2.
        root: sqrt(1 - beta2^step).
        eps: What is added to the divisor.
        size: -lr / (1 - beta1^step).
    """

    decay: float
    weight: float
    keep: float
    added: float
    root: float
    eps: float
    size: float


def numbers_of(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: float
) -> Numbers:
    """Return the numbers of a step as torch.optim.AdamW computes them."""
    beta1, beta2 = betas
    decay = 1 - lr * weight_decay if weight_decay else 1.0  # a product with 1 changes nothing
    root = (1 - beta2**step) ** 0.5
    return Numbers(decay, 1 - beta1, beta2, 1 - beta2, root, eps, -(lr / (1 - beta1**step)))


@cache
def inexact_roots(dtype: torch.dtype) -> tuple[int, int]:
    """Return how many of torch's square roots on this CPU are not correctly rounded, of how many that were tried.

    MKL computes those of fp32, and some of them are one unit in the last place off. A GPU rounds them correctly.
    """
    if dtype == torch.float32:
        generator = torch.Generator().manual_seed(1)
        values = torch.rand(2**17, generator=generator) * 3 + 1  # [1, 4): every mantissa's root
    else:
        values = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        values = values[values.isfinite()]
    return int((values.sqrt() != exact_root(values)).sum()), len(values)


def exact_root(values: Tensor) -> Tensor:
    """Return correctly rounded square roots: fp64 has more than twice the digits."""
    return values.double().sqrt().float().to(values.dtype)


def adamw(
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: Numbers,
    root: Callable[[Tensor], Tensor] = torch.sqrt,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new parameter, mean and mean of squares; each operation rounds to the dtype of all."""
    p = p * numbers.decay
    first = torch.lerp(first, grad, numbers.weight)
    second = (second * numbers.keep).addcmul_(grad, grad, value=numbers.added)
    divisor = (root(second) / numbers.root).add_(numbers.eps)
    return p.addcdiv_(first, divisor, value=numbers.size), first, second


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x · factor, rounded once; every NaN is the one NaN."""
    found = x * torch.tensor(factor, dtype=torch.float32)
    settle_nans(found)
    return found
