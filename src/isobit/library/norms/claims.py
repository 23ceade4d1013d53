"""Claims that the contracts of both norms share: parameter gradients over samples, executors, small rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case, mirror
from isobit.contracts.judge.tally import Tally
from isobit.library import stock
from isobit.library.gradients import gradients
from isobit.library.placements import (
    SAMPLE_LENGTHS,
    in_every_storage_and_thread_count,
    placements,
    put_among_random,
)
from isobit.library.subjects import Subject
from isobit.ops.layer_norm import portable as layer_portable
from isobit.ops.rms_norm import portable as rms_portable
from isobit.order.samples import Samples

HEADS = 6  # two segments of three
EPS = 1e-6


def parameters_of(case: Case) -> list[Tensor]:
    """Return the weight, and the bias of a layer norm."""
    return [t for name, t in case.arguments.items() if name != "x"]


def cancelling_tokens(case: Case, heads: int) -> tuple[Tensor, Tensor]:
    """Return (grad, x) of packed tokens whose terms cancel: a change of order then changes the bits."""
    width = max(heads, 1) * case.sizes["n"]
    grad, x = (case.draw((sum(SAMPLE_LENGTHS), width), stream, "wide") for stream in (8, 9))
    return mirror(grad, 0, -1), mirror(x, 0, 1)


def samples(subject: Subject, case: Case, tally: Tally) -> None:
    """Gradients of parameters are one sum over the samples: packed, padded, in any storage, on any threads."""
    one_sum(subject, case, tally, 0)


def head_samples(subject: Subject, case: Case, tally: Tally) -> None:
    """Gradients of parameters are one sum over the samples, without heads and with heads."""
    one_sum(subject, case, tally, 0)
    one_sum(subject, case, tally, HEADS)


def one_sum(subject: Subject, case: Case, tally: Tally, heads: int) -> None:
    """Compare the parameters' gradients of a packed batch with those of every placement and storage."""
    parameters, lengths = parameters_of(case), SAMPLE_LENGTHS
    grad, x = cancelling_tokens(case, heads)
    options: dict[str, Any] = {"heads": True} if heads else {}

    def found(x: Tensor, grad: Tensor, described: Samples) -> tuple[Tensor, ...]:
        if heads:
            x, grad = (t.view(len(t), heads, -1) for t in (x, grad))
        return gradients(partial(subject, x), parameters, grad, samples=described, **options)

    def compare(x: Tensor, grad: Tensor, described: Samples, where: str) -> None:
        for at, (left, right) in enumerate(zip(whole, found(x, grad, described), strict=True)):
            tally.same(left, right, f"parameter {at}, {heads} heads, {where}")

    tally.count(len(x))
    whole = found(x, grad, Samples.packed(lengths))
    for where, lying in placements(lengths, max(lengths) + 5):
        moved = put_among_random(case, x, lying, 11)
        compare(moved, put_among_random(case, grad, lying, 10), lying, where)
    in_every_storage_and_thread_count(compare, (x, grad), Samples.packed(lengths))


def forward_of(x: Tensor, given: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, means, scales) of the portable executor; one parameter means rms_norm, two layer_norm."""
    if len(given) == 2:
        return layer_portable.layer_norm(x, given[0], given[1], eps)
    y, scales = rms_portable.rms_norm(x, given[0], eps)
    return y, torch.zeros_like(scales), scales


def backward_of(
    grad: Tensor,
    x: Tensor,
    given: Sequence[Tensor],
    statistics: Sequence[Tensor],
    described: Samples,
    heads: int,
) -> tuple[Tensor, ...]:
    """Return dx and the parameters' gradients of the portable executor."""
    means, scales = statistics
    if len(given) == 2:
        return layer_portable.layer_norm_backward(grad, x, given[0], means, scales, described)
    return rms_portable.rms_norm_backward(grad, x, given[0], scales, described, heads)


def gradients_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """All gradients have the portable executor's bits: padding, several samples, heads."""
    parameters = parameters_of(case)
    described = Samples.padded((40, 0, 257), width=260, side="left")
    for heads in (0, HEADS) if len(parameters) == 1 else (0,):
        shape = (described.rows, *([heads] if heads else []), case.sizes["n"])
        x, grad = case.draw(shape, 20, "wide"), case.draw(shape, 21, "wide")
        options: dict[str, Any] = {"samples": described, "eps": EPS}
        options |= {"heads": True} if heads else {}
        tally.count(described.rows)
        found = gradients(subject, (x, *parameters), grad, **options)
        statistics = forward_of(x, parameters, EPS)[1:]
        expected = backward_of(grad, x, parameters, statistics, described, heads)
        for at, (mine, other) in enumerate(zip(found, expected, strict=True)):
            tally.same(mine, other, f"gradient of argument {at}, {heads} heads")


def near_eps(subject: Subject, case: Case, tally: Tally) -> None:
    """Rows whose mean square is about eps are accurate: an eps in the wrong place would show."""
    x = case.arguments["x"] * 2.0**-10
    norm: Subject = stock.rms_norm if len(parameters_of(case)) == 1 else stock.layer_norm
    exact = norm(x.double(), *(p.double() for p in parameters_of(case)), eps=EPS)
    error = (subject(x, *parameters_of(case), eps=EPS).double() - exact).abs()
    tally.count(case.rows)
    allowed = 2e-6 * exact.abs().amax(-1, keepdim=True)
    tally.true(error <= allowed, "over 2e-6 of the row's largest", error)
