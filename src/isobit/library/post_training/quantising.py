"""Claims of quantisation-kernel-v1: `quantize(x)` → (codes, scale, zero), a reference, and planted wrong ones.

A weight is (code − zero) · scale; scales and zeros are [rows, groups], or what broadcasts to it. Schemes: int4 with a
zero point, in groups of 16 columns; int8 and fp8 (e4m3), symmetric, with a scale per row. A tool that has no parameter
`scheme` is called with the weights alone, and is judged by the claims of one scheme.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count

GROUP, LEVELS = 16, 15  # of int4: columns of a group, steps
FP8 = torch.float8_e4m3fn
Quantised = tuple[Tensor, Tensor, Tensor]
Quantize = Callable[..., Quantised]


@dataclass(frozen=True)
class Scheme:
    """What claims need of a scheme.

    Attributes:
        group: Columns with one scale; 0 for whole rows.
        steps: The range of a group in steps, where codes of one sign have half of it.
    """

    group: int
    steps: float

    def groups(self, x: Tensor) -> Tensor:
        """Return [rows, groups, columns of a group], in fp64."""
        return x.double().reshape(len(x), -1, self.group or x.shape[1])


SCHEMES = {"int4": Scheme(GROUP, LEVELS), "int8": Scheme(0, 254), "fp8": Scheme(0, 896)}


def quantize(x: Tensor, scheme: str = "int4") -> Quantised:
    """Round to nearest: four bits with a zero point, or eight bits without one."""
    groups = SCHEMES[scheme].groups(x)
    tiny = torch.finfo(torch.float32).tiny
    if scheme != "int4":
        scale = (groups.abs().amax(-1) / (SCHEMES[scheme].steps / 2)).float().clamp(min=tiny)
        codes = groups / scale.double().unsqueeze(-1)
        whole = codes.clamp(-448, 448).to(FP8) if scheme == "fp8" else codes.round().to(torch.int8)
        return whole.reshape(x.shape), scale, torch.zeros_like(scale)
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scale = ((high - low) / LEVELS).float().clamp(min=tiny)
    zero = (-low / scale.double()).round().clamp(0, LEVELS)
    codes = (groups / scale.double().unsqueeze(-1)).round() + zero.unsqueeze(-1)
    return codes.clamp(0, LEVELS).reshape(x.shape).to(torch.int32), scale, zero.to(torch.int32)


def call(subject: Quantize, x: Tensor, scheme: str = "int4") -> Quantised:
    """Call with rows of whole groups, and with the scheme if the subject has several."""
    if "scheme" in inspect.signature(subject).parameters:
        subject = partial(subject, scheme=scheme)
    return subject(x.flatten(1))


def drawn(case: Case) -> Tensor:
    """Return the drawn weights, [rows, groups · 16]."""
    return next(iter(case.arguments.values())).flatten(1).clone()


def scheme_of(case: Case) -> Scheme:
    """Return the scheme that the case's inputs name."""
    return SCHEMES[str(case.options["scheme"])]


def per_element(x: Tensor, part: Tensor) -> Tensor:
    """Return the scale or zero of each element, [rows, n]."""
    part = part.double()
    part = part.reshape(1, 1) if part.numel() == 1 else part.reshape(len(x), -1)
    part = part.expand(len(x), part.shape[1])
    return part.repeat_interleave(x.shape[1] // part.shape[1], 1)


def decoded(subject: Quantize, case: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the codes stand for, and the scale of each."""
    codes, scale, zero = call(subject, x.clone(), str(case.options["scheme"]))
    each = per_element(x, scale)
    return (codes.double() - per_element(x, zero)) * each, each.abs()


def half_a_step(subject: Quantize, case: Case, tally: Tally) -> None:
    """Each weight is within half a step, plus one rounding of scale and quotient, and half a step of the zero point.

    A zero point is rounded, so that an end of the range may be half a step outside, and is clipped.
    """
    x, scheme = drawn(case), scheme_of(case)
    tally.count(case.rows)
    values, step = decoded(subject, case, x)
    if case.options["scheme"] == "fp8":  # the distance of codes grows with them
        info = torch.finfo(FP8)
        codes = (values / step).abs().clamp(min=float(info.smallest_normal))
        step = step * torch.exp2(torch.floor(torch.log2(codes))) * float(info.eps)
    u = float(torch.finfo(case.dtype).eps) / 2
    error, slack = (values - x.double()).abs(), x.double().abs() * (u + 2.0**-24)
    within = error <= step / 2 + slack
    if case.options["scheme"] == "int4":
        of_x, of_values = scheme.groups(x), scheme.groups(values)
        at_end = (of_x == of_x.amax(-1, True)) | (of_x == of_x.amin(-1, True))
        # Next to an end that was clipped, values may be clipped as well.
        at_end |= (of_values == of_values.amax(-1, True)) | (of_values == of_values.amin(-1, True))
        within |= at_end.reshape(x.shape) & (error <= step + slack)
    tally.true(within, "weights", values)


def fine_steps(subject: Quantize, case: Case, tally: Tally) -> None:
    """A step is the range of its group over the levels, at most a tenth wider: not that of other rows or groups."""
    x, scheme = drawn(case), scheme_of(case)
    tally.count(case.rows)
    _, step = decoded(subject, case, x)
    groups = scheme.groups(x)
    if scheme.group:
        span = groups.amax(-1).clamp(min=0.0) - groups.amin(-1).clamp(max=0.0)
    else:
        span = 2 * groups.abs().amax(-1)
    most = (1.1 * span / scheme.steps + 1e-30).unsqueeze(-1).expand(groups.shape)
    tally.true(step <= most.reshape(x.shape), "steps", step)


def zero_is_exact(subject: Quantize, case: Case, tally: Tally) -> None:
    """A weight of zero stays zero; larger weights of a group have no smaller codes."""
    x, scheme = drawn(case), scheme_of(case)
    x[:, ::GROUP] = 0
    tally.count(case.rows)
    values, _ = decoded(subject, case, x)
    tally.true(values[:, ::GROUP] == 0, "zeros", values[:, ::GROUP])
    order = scheme.groups(x).argsort(-1)
    rising = values.reshape(order.shape).gather(-1, order)
    tally.true(rising[..., 1:] >= rising[..., :-1], "codes in the order of the weights")


def rows_alone(subject: Quantize, case: Case, tally: Tally) -> None:
    """A row has the same codes, scale and zero alone as among others, and on one thread as on two."""
    x = drawn(case)
    tally.count(case.rows)
    with thread_count(1):
        whole = decoded(subject, case, x)
    with thread_count(2):
        again = decoded(subject, case, x)
    for one, other, word in zip(whole, again, ("values", "steps"), strict=True):
        tally.same(other, one, f"{word} on two threads")
    for at in sorted({0, len(x) // 2, len(x) - 1}):
        alone = decoded(subject, case, x[at : at + 1])
        for one, other, word in zip(whole, alone, ("values", "steps"), strict=True):
            tally.same(other, one[at : at + 1], f"{word} of row {at} alone")


# ---- planted, and stock controls


def neighbours_scale(x: Tensor, scheme: str = "int4") -> Quantised:
    """Store the scale of the group before, or of the row before."""
    codes, scale, zero = quantize(x, scheme)
    return codes, scale.roll(1, 1 if scheme == "int4" else 0), zero


def zero_off_by_one(x: Tensor) -> Quantised:
    """Store zero points less one, and read them as they are."""
    codes, scale, zero = quantize(x)
    return codes, scale, zero - 1


def scale_of_the_tensor(x: Tensor, scheme: str = "int4") -> Quantised:
    """Use one scale for the tensor."""
    step = (2 * x.double().abs().max() / SCHEMES[scheme].steps).clamp(min=1e-30)
    codes = x.double() / step
    return codes.to(FP8) if scheme == "fp8" else codes.round(), step, torch.zeros(())


def scale_over_the_batch(x: Tensor, scheme: str = "int4") -> Quantised:
    """Reduce over rows instead of columns, as compressed-tensors #393 did."""
    groups = SCHEMES[scheme].groups(x)
    step = (2 * groups.abs().amax((0, 2)) / SCHEMES[scheme].steps).clamp(min=1e-30)
    step = step.expand(groups.shape[:2])
    codes = (groups / step.unsqueeze(-1)).reshape(x.shape)
    return codes.to(FP8) if scheme == "fp8" else codes.round(), step, torch.zeros_like(step)


def truncated(x: Tensor, scheme: str = "int4") -> Quantised:
    """Cut off instead of rounding."""
    _, scale, zero = quantize(x, scheme)
    quotient = x.double() / per_element(x, scale)
    if scheme == "fp8":  # one bit of the mantissa less
        found = quotient.clamp(-448, 448).to(FP8).view(torch.uint8) & 0xFE
        return found.view(FP8), scale, zero
    codes = quotient.trunc() + per_element(x, zero)
    return codes.clamp(0, LEVELS) if scheme == "int4" else codes, scale, zero


def without_zero_point(x: Tensor) -> Quantised:
    """Have no code for zero."""
    groups = x.double().reshape(len(x), -1, GROUP)
    low, scale = groups.amin(-1), (groups.amax(-1) - groups.amin(-1)).clamp(min=1e-30) / LEVELS
    codes = ((groups - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round()
    return codes.reshape(x.shape), scale, -low / scale


def half_a_code_up(x: Tensor, scheme: str = "int8") -> Quantised:
    """Have codes at halves, as a reader with a zero point of one half does."""
    codes, scale, zero = quantize(x, scheme)
    return codes.double() + 0.5, scale, zero


def swapped_nibbles(x: Tensor, scheme: str = "int4") -> Quantised:
    """Swap neighbouring codes."""
    codes, scale, zero = quantize(x, scheme)
    return codes.double().reshape(len(x), -1, 2).flip(-1).reshape(x.shape), scale, zero


def by_threads(x: Tensor, scheme: str = "int4") -> Quantised:
    """Take another scale on two threads."""
    codes, scale, zero = quantize(x, scheme)
    return codes, scale * (1 + 2.0**-20 * (torch.get_num_threads() - 1)), zero


def torch_dynamic(x: Tensor) -> Quantised:
    """Quantise as torch's dynamic int8 layers do activations: one scale for the tensor, so for all rows of a batch."""
    low, high = x.float().amin().clamp(max=0.0), x.float().amax().clamp(min=0.0)
    scale = ((high - low) / 255).clamp(min=1e-30)
    zero = (-128 - low / scale).round()
    return ((x.float() / scale).round() + zero).clamp(-128, 127), scale, zero


def scaled_mm_of_the_tensor(x: Tensor) -> Quantised:
    """Quantise as examples of torch._scaled_mm do: one fp8 scale for the tensor, in the dtype of the weights."""
    scale = (x.abs().max() / torch.finfo(FP8).max).clamp(min=1e-12)
    return (x / scale).clamp(-448, 448).to(FP8), scale.float(), torch.zeros(())
