"""The step of AdamW: its definition, by torch's operations on the CPU.

[Note: the step]
A parameter p, its gradient g, its mean m and its mean of squares v become, with the numbers of `Numbers` in fp32:

    m' = m · keep_mean + g · add_mean
    v' = v · keep_square + (g · add_square) · g
    p' = p · decay - (m' · rate) / (√v' · spread + eps)

Every operation is one of IEEE 754, in fp32, correctly rounded; none is fused with another. So an executor needs no more
than products, sums, a quotient and a square root to have the same bits, and each element's step depends on that element
alone. Values of 16 bits are widened first. The three results are rounded once, to the dtype of the tensors, and every
NaN is the one NaN of isobit's results. In fp64 the same operations are those of fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, wide_values
from isobit.ops.portable.sums import round_once, settle_nans, widen


class Numbers(NamedTuple):
    """The numbers of a step, computed in fp64 and used as fp32.

    Attributes:
        decay: 1 - lr · weight_decay.
        keep_mean: beta1.
        add_mean: 1 - beta1; negative if the objective is maximized.
        keep_square: beta2.
        add_square: 1 - beta2.
        spread: 1 / sqrt(1 - beta2^step).
        eps: What is added to the divisor.
        rate: lr / (1 - beta1^step).
    """

    decay: float
    keep_mean: float
    add_mean: float
    keep_square: float
    add_square: float
    spread: float
    eps: float
    rate: float


def numbers_of(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: float,
    *,
    maximize: bool = False,
) -> Numbers:
    """Return the numbers of a step, counted from 1."""
    beta1, beta2 = betas
    add_mean = beta1 - 1 if maximize else 1 - beta1
    spread = 1 / (1 - beta2**step) ** 0.5
    decay, rate = 1 - lr * weight_decay, lr / (1 - beta1**step)
    return Numbers(decay, beta1, add_mean, beta2, 1 - beta2, spread, eps, rate)


def exact_root(values: Tensor) -> Tensor:
    """Return correctly rounded square roots of fp32 values; those of fp64 are torch's.

    torch's square roots of fp32 come from MKL, and some are one unit in the last place off. The root of an fp32 value
    is at least 2^-51 of itself away from where two fp32 values meet, so a root in fp64 that is off by less than one
    unit in its last place, 2^-52, is rounded to the right side.
    """
    return values.double().sqrt().to(values.dtype)


def adamw(
    p: Tensor, grad: Tensor, first: Tensor, second: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new parameter, mean and mean of squares; see [Note: the step]."""
    g = widen(grad)
    mean = widen(first) * numbers.keep_mean + g * numbers.add_mean
    square = widen(second) * numbers.keep_square + (g * numbers.add_square) * g
    divisor = exact_root(square) * numbers.spread + numbers.eps
    value = widen(p) * numbers.decay - (mean * numbers.rate) / divisor
    return round_once(value, p.dtype), round_once(mean, p.dtype), round_once(square, p.dtype)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x · factor, rounded once; every NaN is the one NaN."""
    found = x * torch.tensor(factor, dtype=torch.float32)
    settle_nans(found)
    return found


# Compare an executor's steps of AdamW, and of scaling, with their definition on the CPU, bit for bit.

EXTENT = 77
STEPS = (1.0, 3.0, 1000.0)
BETAS = ((0.9, 0.999), (0.0, 0.5))


def call_in_place(name: str, *given: Any) -> Any:
    """Call a native executor, which changes its arguments, with copies."""
    if name == "scaled":
        x = given[0].clone()
        torch.ops.isobit.scale_([x], given[1])
        return x
    p, grad, first, second = (tensor.clone() for tensor in given[:4])
    torch.ops.isobit.adamw_([p], [grad], [first], [second], given[4:])
    return p, first, second


def difference(dtype: torch.dtype, call: Call = call_in_place) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    p, grad, first, second = (wide_values((5, EXTENT), dtype, generator) for _ in range(4))
    grad[0, :3], first[0, 1:4] = 0.0, -0.0
    second = second.abs()
    for step, betas in ((step, betas) for step in STEPS for betas in BETAS):
        numbers = numbers_of(1e-3, betas, 1e-8, 0.1 if step > 1 else 0.0, step)
        found = call("adamw", p, grad, first, second, *numbers)
        if not all(map(bits.equal, found, adamw(p, grad, first, second, numbers))):
            return f"AdamW's step {step:.0f}"
    factor = float(torch.tensor(0.3))
    same = bits.equal(call("scaled", grad, factor), scaled(grad, factor))
    return None if same else "a gradient times a number"
