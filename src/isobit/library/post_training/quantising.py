"""Claims of quantisation-kernel-v1: `quantize(x)` → (codes, scale, zero), a reference, and planted wrong ones.

A weight is (code − zero) · scale; scales and zeros are [rows, groups], or what broadcasts to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count

GROUP, LEVELS = 16, 15  # columns of a group, steps of four bits
Quantised = tuple[Tensor, Tensor, Tensor]
Quantize = Callable[[Tensor], Quantised]


def quantize(x: Tensor) -> Quantised:
    """Round groups of 16 columns to four bits with a zero point, to nearest."""
    groups = x.double().reshape(len(x), -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scale = ((high - low) / LEVELS).float().clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-low / scale.double()).round().clamp(0, LEVELS)
    codes = (groups / scale.double().unsqueeze(-1)).round() + zero.unsqueeze(-1)
    return codes.clamp(0, LEVELS).reshape(x.shape).to(torch.int32), scale, zero.to(torch.int32)


def call(subject: Quantize, x: Tensor) -> Quantised:
    """Call with rows of whole groups."""
    return subject(x.flatten(1))


def drawn(case: Case) -> Tensor:
    """Return the drawn weights, [rows, groups · 16]."""
    return next(iter(case.arguments.values())).flatten(1).clone()


def per_element(x: Tensor, part: Tensor) -> Tensor:
    """Return the scale or zero of each element, [rows, n]."""
    part = part.double()
    part = part.reshape(1, 1) if part.numel() == 1 else part.reshape(len(x), -1)
    part = part.expand(len(x), part.shape[1])
    return part.repeat_interleave(x.shape[1] // part.shape[1], 1)


def decoded(subject: Quantize, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the codes stand for, and each element's step."""
    codes, scale, zero = subject(x.clone())
    step = per_element(x, scale)
    return (codes.double() - per_element(x, zero)) * step, step.abs()


def half_a_step(subject: Quantize, case: Case, tally: Tally) -> None:
    """Each weight is within half a step, plus one rounding of scale and quotient, and half a step of the zero point.

    A zero point is rounded, so that an end of the range may be half a step outside, and is clipped.
    """
    x = drawn(case)
    tally.count(case.rows)
    values, step = decoded(subject, x)
    u = float(torch.finfo(case.dtype).eps) / 2
    ends = x.double().reshape(len(x), -1, GROUP)
    at_end = (ends == ends.amax(-1, True)) | (ends == ends.amin(-1, True))
    near_end = at_end.reshape(x.shape)
    slack = x.double().abs() * (u + 2.0**-24)
    within = (values - x.double()).abs() <= step * torch.where(near_end, 1.0, 0.5) + slack
    # Next to an end that was clipped, values may be clipped as well.
    clipped = (values == ends_of(values, True)) | (values == ends_of(values, False))
    tally.true(
        within | (clipped & ((values - x.double()).abs() <= step + slack)), "weights", values
    )


def ends_of(values: Tensor, high: bool) -> Tensor:
    """Return the largest or least value of each element's group."""
    groups = values.reshape(len(values), -1, GROUP)
    found = groups.amax(-1, True) if high else groups.amin(-1, True)
    return found.expand(groups.shape).reshape(values.shape)


def fine_steps(subject: Quantize, case: Case, tally: Tally) -> None:
    """A step is the range of its group over the levels, at most a tenth wider: not that of a row or the tensor."""
    x = drawn(case)
    tally.count(case.rows)
    _, step = decoded(subject, x)
    groups = x.double().reshape(len(x), -1, GROUP)
    span = groups.amax(-1).clamp(min=0.0) - groups.amin(-1).clamp(max=0.0)
    most = (1.1 * span / LEVELS + 1e-30).unsqueeze(-1).expand(groups.shape).reshape(x.shape)
    tally.true(step <= most, "steps", step)


def zero_is_exact(subject: Quantize, case: Case, tally: Tally) -> None:
    """A weight of zero stays zero; larger weights of a group have no smaller codes."""
    x = drawn(case)
    x[:, ::GROUP] = 0
    tally.count(case.rows)
    values, _ = decoded(subject, x)
    tally.true(values[:, ::GROUP] == 0, "zeros", values[:, ::GROUP])
    order = x.double().reshape(len(x), -1, GROUP).argsort(-1)
    rising = values.reshape(order.shape).gather(-1, order)
    tally.true(rising[..., 1:] >= rising[..., :-1], "codes in the order of the weights")


def rows_alone(subject: Quantize, case: Case, tally: Tally) -> None:
    """A row has the same codes, scale and zero alone as among others, and on one thread as on two."""
    x = drawn(case)
    tally.count(case.rows)
    with thread_count(1):
        whole = decoded(subject, x)
    with thread_count(2):
        again = decoded(subject, x)
    for one, other, word in zip(whole, again, ("values", "steps"), strict=True):
        tally.same(other, one, f"{word} on two threads")
    for at in sorted({0, len(x) // 2, len(x) - 1}):
        alone = decoded(subject, x[at : at + 1])
        for one, other, word in zip(whole, alone, ("values", "steps"), strict=True):
            tally.same(other, one[at : at + 1], f"{word} of row {at} alone")


# ---- planted


def neighbours_scale(x: Tensor) -> Quantised:
    """Store the scale of the group before."""
    codes, scale, zero = quantize(x)
    return codes, scale.roll(1, 1), zero


def zero_off_by_one(x: Tensor) -> Quantised:
    """Store zero points less one, and read them as they are."""
    codes, scale, zero = quantize(x)
    return codes, scale, zero - 1


def scale_of_the_tensor(x: Tensor) -> Quantised:
    """Use one scale for the tensor."""
    step = (2 * x.double().abs().max() / LEVELS).clamp(min=1e-30)
    return (x.double() / step).round(), step, torch.zeros(())


def scale_over_the_batch(x: Tensor) -> Quantised:
    """Reduce over rows instead of columns."""
    groups = x.double().reshape(len(x), -1, GROUP)
    step = (2 * groups.abs().amax((0, 2)) / LEVELS).clamp(min=1e-30).expand(groups.shape[:2])
    return (groups / step.unsqueeze(-1)).round().reshape(x.shape), step, torch.zeros_like(step)


def truncated(x: Tensor) -> Quantised:
    """Cut off instead of rounding."""
    _, scale, zero = quantize(x)
    codes = (x.double() / per_element(x, scale)).trunc() + per_element(x, zero)
    return codes.clamp(0, LEVELS), scale, zero


def without_zero_point(x: Tensor) -> Quantised:
    """Have no code for zero."""
    groups = x.double().reshape(len(x), -1, GROUP)
    low, scale = groups.amin(-1), (groups.amax(-1) - groups.amin(-1)).clamp(min=1e-30) / LEVELS
    codes = ((groups - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round()
    return codes.reshape(x.shape), scale, -low / scale


def swapped_nibbles(x: Tensor) -> Quantised:
    """Swap neighbouring codes."""
    codes, scale, zero = quantize(x)
    return codes.reshape(len(x), -1, 2).flip(-1).reshape(x.shape), scale, zero


def by_threads(x: Tensor) -> Quantised:
    """Take another scale on two threads."""
    codes, scale, zero = quantize(x)
    return codes, scale * (1 + 2.0**-20 * (torch.get_num_threads() - 1)), zero
