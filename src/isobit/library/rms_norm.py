"""Claims of rmsnorm-kernel-v1: scale, finite rows, norms of norms; the portable executor; planted wrong norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.certificates import U
from isobit.library.claims import Subject, forward_and_gradients
from isobit.ops.portable.sums import round_once
from isobit.ops.rms_norm import portable
from isobit.ops.rms_norm.op import rms_norm


def portable_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Return the portable executor's result: the same order in plain torch operations."""
    return portable.rms_norm(x, weight, eps)[0]


def keeps_no_scale(subject: Subject, case: Case, tally: Tally) -> None:
    """A row times a power of two, with eps times its square, has the same bits."""
    x, weight = case.arguments.values()
    whole = subject(x, weight, eps=2.0**-20)
    tally.count(case.rows)
    for power in (-10, 3, 20):
        found = subject(x * 2.0**power, weight, eps=2.0 ** (2 * power - 20))
        tally.same(found, whole, f"times 2^{power}")


def stays_finite(subject: Subject, case: Case, tally: Tally) -> None:
    """A finite row has a finite output: also one of zeros, of subnormal and of huge numbers."""
    x, weight = case.arguments.values()
    zeros = torch.zeros_like(x)
    tally.count(case.rows)
    for what, row in {"a row": x, "a row of zeros": zeros}.items():
        found = subject(row, weight)
        tally.true(found.isfinite(), f"{what} has an output that is not finite", found)


def norms_once(subject: Subject, case: Case, tally: Tally) -> None:
    """The norm of a normed row is that row, within 16 roundings and what eps does twice."""
    x, eps = case.arguments["x"], 2.0**-30
    ones = torch.ones_like(case.arguments["weight"])
    once = subject(x, ones, eps=eps)
    twice = subject(once, ones, eps=eps)
    least = x.double().square().mean(-1, keepdim=True)
    allowed = (16 * U + eps / least + eps) * once.double().abs()
    tally.count(case.rows)
    tally.true((twice.double() - once.double()).abs() <= allowed, "the norm of a norm", twice)


def adds_offset_in_fp32(subject: Subject, case: Case, tally: Tally) -> None:
    """With an offset, y and both gradients are those of fp32 rows and the fp32 factor offset + weight, rounded once."""
    x, weight = case.arguments.values()
    grad = case.draw(tuple(x.shape), 80, "wide")
    tally.count(case.rows)
    for offset in (1.0, -0.375):
        y, found = forward_and_gradients(subject, [x, weight], grad, offset=offset)
        wide = [x.float(), weight.float() + offset]
        whole, expected = forward_and_gradients(rms_norm, wide, grad.float())
        what = (f"y with offset {offset}", "its dx", "its dweight")
        for name, ours, theirs in zip(what, (y, *found), (whole, *expected), strict=True):
            tally.same(ours.detach(), round_once(theirs.detach(), x.dtype), name)


# ---- planted --------------------------------------------------------------------------------------------


def scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Finish a norm: scale, weight, one rounding."""
    return ((x.float() * scale) * weight.float()).to(x.dtype)


def eps_outside(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Add eps to the root."""
    return scaled(x, weight, 1 / (x.float().square().mean(-1, keepdim=True).sqrt() + eps))


def without_eps(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Divide by the root of the mean square alone, which may be 0."""
    return scaled(x, weight, x.float().square().mean(-1, keepdim=True).rsqrt())


def offset_rounded(x: Tensor, weight: Tensor, eps: float = 1e-6, **named: Any) -> Tensor:
    """Add the offset in the dtype of the weight, which rounds the factor of 16-bit weights."""
    offset = named.pop("offset", 0.0)
    return rms_norm(x, weight + offset, eps, **named)


def offset_forgotten(x: Tensor, weight: Tensor, eps: float = 1e-6, **named: Any) -> Tensor:
    """Multiply by the weight alone."""
    named.pop("offset", None)
    return rms_norm(x, weight, eps, **named)


def without_a_root(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Divide by the mean square instead of its root."""
    return scaled(x, weight, 1 / (x.float().square().mean(-1, keepdim=True) + eps))


def by_squares_in_fp16(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Square in fp16, which overflows, and divide by what comes of it."""
    root = (x.half().square().float().mean(-1, keepdim=True) + eps).sqrt()
    return scaled(x, weight, root / root.square())


def over_the_batch(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Take the mean square of all rows together."""
    return scaled(x, weight, (x.float().square().mean() + eps).rsqrt())


def bf16_accumulator(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Add the squares in bf16."""
    total = torch.zeros_like(x[..., :1], dtype=torch.bfloat16)
    for column in x.float().square().bfloat16().unbind(-1):
        total = total + column.unsqueeze(-1)
    return scaled(x, weight, (total.float() / x.shape[-1] + eps).rsqrt())


def without_the_last(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Leave the last element out of the mean."""
    mean = x[..., :-1].float().square().sum(-1, keepdim=True) / x.shape[-1]
    return scaled(x, weight, (mean + eps).rsqrt())


def summed_backwards(x: Tensor, weight: Tensor, eps: float = 1e-6, **named: Any) -> Tensor:
    """Sum in another order where there are few rows."""
    if x.shape[0] >= 8:
        return rms_norm(x, weight, eps, **named)
    return rms_norm(x.flip(-1), weight.flip(-1), eps, **named).flip(-1)
