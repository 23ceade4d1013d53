"""Claims that the contracts of SiLU, GELU and SwiGLU share, and their portable executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.relations import same_class, unit_size
from isobit.contracts.judge.tally import Tally
from isobit.library import stock
from isobit.library.certificates import U
from isobit.library.claims import Predicate, Subject
from isobit.library.stock import exact_gelu
from isobit.ops.gelu import portable as gelu_portable
from isobit.ops.gelu.op import gelu
from isobit.ops.silu import portable as silu_portable
from isobit.ops.silu.op import silu
from isobit.ops.swiglu import portable as swiglu_portable
from isobit.ops.swiglu.op import swiglu

LOST = 2.0**-119  # exponentials below 2^-126 are 0, and |x| is below 128 there


def portable_silu(x: Tensor) -> Tensor:
    """Return the portable executor's result."""
    return silu_portable.silu(x)


def portable_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return the portable executor's result."""
    return gelu_portable.gelu(x, approximate == "tanh")


def portable_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return the portable executor's result."""
    return swiglu_portable.swiglu(gate, up)


def stands_anywhere(subject: Subject, case: Case, tally: Tally) -> None:
    """An element has the same bits at every lane, in rows of seven, three apart, and alone."""
    given = [t.reshape(-1) for t in case.arguments.values()]
    whole = subject(*given, **case.options)
    for k in (1, 5, 8, 15):
        found = subject(*(t[k:] for t in given), **case.options)
        tally.same(found, whole[k:], f"from element {k} on")
    sevens = len(whole) // 7
    rows = subject(*(in_rows(t[: 7 * sevens]) for t in given), **case.options)
    tally.same(rows.reshape(-1), whole[: 7 * sevens], "in rows of seven")
    apart = subject(*(t.unsqueeze(1).repeat(1, 3)[:, 1] for t in given), **case.options)
    tally.same(apart, whole, "three apart")
    for at in {0, len(whole) // 2, len(whole) - 1} if len(whole) else ():
        alone = subject(*(t[at : at + 1].clone() for t in given), **case.options)
        tally.same(alone, whole[at : at + 1], f"element {at} alone")
    tally.count(case.rows)


def in_rows(flat: Tensor) -> Tensor:
    """Return [n / 7, 7] with a gap after each row."""
    room = flat.new_zeros(len(flat) // 7, 9)
    room[:, :7] = flat.view(-1, 7)
    return room[:, :7]


def reflects(subject: Subject, case: Case, tally: Tally) -> None:
    """f(x) - f(-x) = x, within sixteen roundings of fp32."""
    x = case.arguments["x"]
    found = subject(x, **case.options).double() - subject(-x, **case.options).double()
    tally.count(case.rows)
    allowed = 16 * U * x.double().abs() + LOST
    tally.true((found - x.double()).abs() <= allowed, "f(x) − f(−x) is not x", found)


def is_bounded(subject: Subject, case: Case, tally: Tally) -> None:
    """GELU is at least −0.1701, at most x where x is positive, and not positive elsewhere."""
    x = case.arguments["x"]
    found = subject(x, **case.options)
    tally.count(case.rows)
    tally.true(found >= -0.1701, "below −0.1701", found)
    tally.true(found <= x.clamp(min=0), "above x, or above 0 for a negative x", found)


def grows(subject: Subject, case: Case, tally: Tally) -> None:
    """From −0.75 on, where its slope is positive, GELU of a larger x is not smaller."""
    x = case.arguments["x"].float().clamp(min=-0.75)
    more = x + torch.where(x.abs() > 2.0**-6, x.abs() * 2.0**-9, 2.0**-15)
    left, right = (subject(t.to(case.dtype), **case.options) for t in (x, more))
    tally.count(case.rows)
    tally.true(left <= right, "a larger x has a smaller value", left)


def is_gated(subject: Subject, case: Case, tally: Tally) -> None:
    """SwiGLU is 0 where gate or up is; up times four gives four times the value, to the bit."""
    gate, up = case.arguments.values()
    tally.count(case.rows)
    nothing = torch.zeros_like(gate)
    for what, given in {"gate": (nothing, up), "up": (gate, nothing)}.items():
        found = subject(*given)
        tally.true(found == 0, f"{what} is 0, the value is not", found)
    found, four = subject(gate, up), subject(gate, 4 * up)
    exact = found.abs() >= 2 * torch.finfo(found.dtype).smallest_normal  # smaller ones lose bits
    tally.true(~exact | (four == 4 * found), "up times four", four)


def rounds_once(exact: Subject, roundings: Callable[[Case], int]) -> Predicate:
    """Return a claim: errors are half a unit in the last place plus so many fp32 roundings.

    A result that underflows may be 0.
    """

    def holds(subject: Subject, case: Case, tally: Tally) -> None:
        found = subject(*case.arguments.values(), **case.options)
        true = exact(*(t.double() for t in case.arguments.values()), **case.options)
        rounded = true.to(found.dtype)
        lost = LOST * case.arguments["up"].double().abs() if "up" in case.arguments else LOST
        allowed = unit_size(rounded, true, "ulp") / 2 + roundings(case) * U * true.abs() + lost
        close = (found.double() - true).abs() <= allowed
        tally.count(case.rows)
        tally.true(close | same_class(found, rounded), "not rounded once", found)

    return holds


# exp is within two roundings, 1 + e and the division cost one each.
silu_rounds_once = rounds_once(stock.silu, lambda case: 4)
swiglu_rounds_once = rounds_once(stock.swiglu, lambda case: 5)
# An exponent up to 87 carries one rounding (x²) or five (x (k + k' x²)); the polynomial cancels 1.4 of 2: fifty more.
gelu_rounds_once = rounds_once(
    stock.exact_gelu, lambda case: 440 if case.options.get("approximate") == "tanh" else 140
)


# Planted wrong elementwise functions: other tails, other kernels for few elements, extra roundings, other formulas.


def with_a_tail_of(function: Subject, other: Subject) -> Subject:
    """Compute the elements that do not fill sixteen lanes of a row by other code."""

    def wrong(*given: Any, **named: Any) -> Tensor:
        y, n = function(*given, **named), given[0].shape[-1]
        if n % 16:
            tail = [t[..., n // 16 * 16 :] if isinstance(t, Tensor) else t for t in given]
            y = torch.cat([y[..., : n // 16 * 16], other(*tail, **named)], -1)
        return y

    return wrong


def by_libm(x: Tensor) -> Tensor:
    """Return x times torch's sigmoid, in fp32."""
    return (x.float() * torch.sigmoid(x.float())).to(x.dtype)


def swiglu_by_libm(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate times torch's sigmoid times up, in fp32."""
    return (by_libm(gate.float()) * up.float()).to(up.dtype)


def by_error_function(x: Tensor, approximate: str = "none") -> Tensor:
    """Return the exact formulas in fp32."""
    return exact_gelu(x.float(), approximate).to(x.dtype)


silu_with_other_tail = with_a_tail_of(silu, by_libm)
gelu_with_other_tail = with_a_tail_of(gelu, by_error_function)
swiglu_with_other_tail = with_a_tail_of(swiglu, swiglu_by_libm)


def silu_in_small_batches_by_stock(x: Tensor) -> Tensor:
    """Use another kernel for few elements."""
    return F.silu(x) if x.numel() < 500 else silu(x)


def gelu_in_small_batches_by_stock(x: Tensor, approximate: str = "none") -> Tensor:
    """Use another kernel for few elements."""
    return F.gelu(x, approximate=approximate) if x.numel() < 500 else gelu(x, approximate)


def swiglu_in_small_batches_by_libm(gate: Tensor, up: Tensor) -> Tensor:
    """Use another kernel for few elements."""
    return swiglu_by_libm(gate, up) if gate.numel() < 500 else swiglu(gate, up)


def silu_rounded_between(x: Tensor) -> Tensor:
    """Round the logistic function to bf16."""
    return (x.float() * torch.sigmoid(x.float()).bfloat16().float()).to(x.dtype)


def gelu_rounded_between(x: Tensor, approximate: str = "none") -> Tensor:
    """Round the factor of x to bf16."""
    share = exact_gelu(x.double(), approximate) / x.double()
    return (x.float() * share.nan_to_num(0.5, 1.0, 0.0).bfloat16().float()).to(x.dtype)


def swiglu_rounded_between(gate: Tensor, up: Tensor) -> Tensor:
    """Round silu to bf16 before the product."""
    return (silu(gate).bfloat16().float() * up.float()).to(up.dtype)


def silu_too_steep(x: Tensor) -> Tensor:
    """Use the slope 1.702 of the sigmoid approximation of GELU."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def gelu_the_other(x: Tensor, approximate: str = "none") -> Tensor:
    """Exchange the exact function and its tanh approximation."""
    return gelu(x, "none" if approximate == "tanh" else "tanh")


def gelu_by_difference(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute 1 + erf in fp32, which is 0 below -5.6 and inaccurate above it."""
    return (0.5 * x.float() * (1 + torch.erf(x.float() / 2**0.5))).to(x.dtype)


def gelu_of_a_leaky_kind(x: Tensor, approximate: str = "none") -> Tensor:
    """Pass a hundredth of x below -3."""
    return torch.where(x < -3, x / 10, gelu(x, approximate))


def gelu_with_a_step(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x from 1.5 on less a hundredth, so that the value falls there."""
    y = gelu(x, approximate)
    return torch.where(x >= 1.5, y - 0.0625, y)


def gelu_above_x(x: Tensor, approximate: str = "none") -> Tensor:
    """Return two units of bf16 more than x above 4."""
    return torch.where(x > 4, x * 1.015625, gelu(x, approximate))


def swiglu_by_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by the sigmoid alone, which is not 0 at 0."""
    return (torch.sigmoid(gate.float()) * up.float()).to(up.dtype)


def swiglu_with_a_limit(gate: Tensor, up: Tensor) -> Tensor:
    """Limit up to 7, as some models do."""
    return swiglu(gate, up.clamp(-7, 7))


def swiglu_exchanged(gate: Tensor, up: Tensor) -> Tensor:
    """Exchange gate and up."""
    return swiglu(up, gate)


def by_lane(function: Subject) -> Subject:
    """Change every sixteenth element by a unit of bf16."""

    def wrong(*given: Any, **named: Any) -> Tensor:
        y = function(*given, **named).clone()
        y.view(-1)[3::16] *= 1.0078125
        return y

    return wrong


silu_off_by_lane, gelu_off_by_lane = by_lane(silu), by_lane(gelu)
swiglu_off_by_lane = by_lane(swiglu)
