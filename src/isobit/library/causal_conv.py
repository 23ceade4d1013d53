"""Claims of causal-conv-v1: a sample's convolution in every cut and place, its error, and wrong convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library import refused_calls
from isobit.library.claims import (
    forward_and_gradients,
    in_every_storage_and_thread_count,
    must_raise,
    on_one_thread,
    placements,
    put_among_random,
    rows_of,
    with_backward,
)
from isobit.ops.causal_conv import reference
from isobit.ops.causal_conv.op import causal_conv
from isobit.order.samples import Samples

TAPS = 4
LENGTHS = (5, 1, 0, 2, 17, 3)
PIECES = (1, 2, 7, 1, 1, 4, 3)


@dataclass(frozen=True)
class Convolution:
    """A convolution with the arguments of isobit.causal_conv."""

    convolve: Callable[..., Tensor]

    def __call__(self, x: Tensor, weight: Tensor, **named: Any) -> Tensor:
        """Convolve."""
        return self.convolve(x, weight, **named)


@on_one_thread
def by_pieces(subject: Convolution, case: Case, tally: Tally) -> None:
    """A sample in pieces, each behind the rows before it, has the bits of the whole."""
    x, weight = case.arguments.values()
    tally.count(len(x))
    whole, before, at = subject(x, weight), x.new_zeros(1, TAPS - 1, x.shape[1]), 0
    for number in range(len(x)):
        end = min(at + PIECES[(case.recipe.seed + number) % len(PIECES)], len(x))
        if at < end:
            found = subject(x[at:end], weight, before=before)
            tally.same(found, whole[at:end], f"rows {at} to {end}")
            before = torch.cat((before[0], x[at:end]))[None, -(TAPS - 1) :]
        at = end


@on_one_thread
def placed(subject: Convolution, case: Case, tally: Tally) -> None:
    """y, dx and dweight have the same bits in every placement, storage and thread count; each sample that of itself."""
    weight = case.arguments["weight"]
    described = Samples.packed(LENGTHS)
    rows = case.draw((described.rows, len(weight)), 80)
    grad = case.draw((described.rows, len(weight)), 81)
    tally.count(len(rows))

    def run(x: Tensor, upstream: Tensor, where: Samples) -> tuple[Tensor, Tensor, Tensor]:
        y, (dx, dweight) = forward_and_gradients(subject, [x, weight], upstream, samples=where)
        at = rows_of(where)
        return y.detach()[at], dx[at], dweight

    expected = run(rows, grad, described)
    for start, length in described.spans:
        alone = subject(rows[start : start + length], weight)
        tally.same(expected[0][start : start + length], alone, f"a sample of {length} by itself")

    def compare(x: Tensor, upstream: Tensor, where: Samples, name: str) -> None:
        for what, a, b in zip(
            ("y", "dx", "dweight"), run(x, upstream, where), expected, strict=True
        ):
            tally.same(a, b, f"{what} {name}")

    for name, where in placements(LENGTHS, 18):
        room = put_among_random(case, rows, where, 82)
        compare(room, put_among_random(case, grad, where, 83), where, name)
    in_every_storage_and_thread_count(compare, [rows, grad], described)


def accurate(subject: Convolution, case: Case, tally: Tally) -> None:
    """The error is within K roundings of the sum of absolute products in fp32, and one rounding of the result.

    Each of K products has one rounding, and is in at most K − 1 rounded sums: K in all, each at most half an eps of
    what is rounded, which the sum of absolute products bounds (1 + eps)^K-fold. A whole eps each covers both.
    """
    x, weight = case.arguments.values()
    tally.count(len(x))
    found = subject(x, weight).double()
    exact = reference.causal_conv(x, weight)
    size = reference.causal_conv(x.abs(), weight.abs())
    chain = TAPS * torch.finfo(torch.float32).eps * size
    rounding = torch.finfo(x.dtype).eps * (exact.abs() + chain)
    least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    tally.true((found - exact).abs() <= chain + rounding + least, "within the bound", found)


def refuses(subject: Convolution, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy."""
    tally.count(1)
    for what, given, named in refused_calls.causal_conv():
        must_raise(partial(subject, *given, **named), what, tally)


# ---- planted --------------------------------------------------------------------------------------------------


@Convolution
def stock(
    x: Tensor, weight: Tensor, samples: Samples | None = None, before: Tensor | None = None
) -> Tensor:
    """Convolve by torch: rows of all samples, with a kernel that is chosen by the number of rows."""
    kept = TAPS - 1
    if not len(x):
        return x
    rows = torch.cat((x.new_zeros(kept, x.shape[1]) if before is None else before[0], x))
    if len(x) == 1:  # as decoding does: a product and a sum
        return (rows * weight[:, 0].t()).sum(0, keepdim=True)
    return torch.nn.functional.conv1d(rows.t()[None], weight, groups=len(weight))[0].t()


@Convolution
def leaks_between_samples(x: Tensor, weight: Tensor, samples: Any = None, **named: Any) -> Tensor:
    """Read the rows before a sample, whoever's they are."""
    return causal_conv(x, weight, **named)


@Convolution
def gradient_leaks(x: Tensor, weight: Tensor, samples: Any = None, **named: Any) -> Tensor:
    """Deliver gradients to the rows before a sample."""

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        dx, _ = forward_and_gradients(causal_conv, [x, weight], grad)[1]
        right = forward_and_gradients(causal_conv, [x, weight], grad, samples=samples)[1]
        return dx, right[1]

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv(x, weight, samples=samples, **named)

    return with_backward(forward, backward, x, weight)


@Convolution
def sums_padding(x: Tensor, weight: Tensor, samples: Any = None, **named: Any) -> Tensor:
    """Add rows of no sample into the gradient of weight."""

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        right = forward_and_gradients(causal_conv, [x, weight], grad, samples=samples)[1]
        return right[0], forward_and_gradients(causal_conv, [x, weight], grad)[1][1]

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv(x, weight, samples=samples, **named)

    return with_backward(forward, backward, x, weight)


def newest_first(x: Tensor, weight: Tensor, **named: Any) -> Tensor:
    """Add the taps from the newest row to the oldest."""
    wide, kept = x.float(), TAPS - 1
    spans = (
        Samples.packed([len(x)]).spans if named.get("samples") is None else named["samples"].spans
    )
    y = torch.zeros_like(wide)
    for index, (start, length) in enumerate(spans):
        before = named.get("before")
        past = wide.new_zeros(kept, x.shape[1]) if before is None else before[index].float()
        rows = torch.cat((past, wide[start : start + length]))
        for tap in reversed(range(TAPS)):
            y[start : start + length] += rows[tap : tap + length] * weight[:, 0, tap].float()
    return y.to(x.dtype)


@Convolution
def newest_first_when_decoding(x: Tensor, weight: Tensor, **named: Any) -> Tensor:
    """Add in another order where there is one row."""
    return newest_first(x, weight, **named) if len(x) == 1 else causal_conv(x, weight, **named)


@Convolution
def newest_first_in_long_batches(x: Tensor, weight: Tensor, **named: Any) -> Tensor:
    """Add in another order where there are more rows than those of the samples."""
    right = causal_conv(x, weight, **named)
    if len(x) <= sum(LENGTHS):
        return right
    return right + (newest_first(x, weight, **named) - right).detach()


@Convolution
def forgets_the_past(x: Tensor, weight: Tensor, before: Any = None, **named: Any) -> Tensor:
    """Begin with zeros behind a cache."""
    return causal_conv(x, weight, **named)


@Convolution
def one_row_stale(x: Tensor, weight: Tensor, before: Any = None, **named: Any) -> Tensor:
    """Read rows that are one token too old."""
    return causal_conv(x, weight, before=None if before is None else before.roll(1, 1), **named)


@Convolution
def taps_reversed(x: Tensor, weight: Tensor, **named: Any) -> Tensor:
    """Multiply the newest row by the oldest tap."""
    return causal_conv(x, weight.flip(-1), **named)


@Convolution
def one_tap_fewer(x: Tensor, weight: Tensor, **named: Any) -> Tensor:
    """Leave out the oldest tap."""
    return causal_conv(
        x, torch.cat((torch.zeros_like(weight[..., :1]), weight[..., 1:]), -1), **named
    )


@Convolution
def sums_in_16_bits(x: Tensor, weight: Tensor, **named: Any) -> Tensor:
    """Round after each tap to bf16."""
    return causal_conv(x.bfloat16(), weight.bfloat16(), **named).to(x.dtype) * (1 + 2.0**-7)


@Convolution
def careless(x: Any, weight: Any, **_: Any) -> Tensor:
    """Take every call."""
    return torch.zeros_like(x)


ours = Convolution(causal_conv)
