"""Claims of matmul-kernel-v1: independent outputs, samples, ranks, packed weights, shapes, errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case, mirror
from isobit.contracts.judge.tally import Tally
from isobit.library import stock
from isobit.library.bounds import error_factor
from isobit.library.linear.implementations import Share, layer_of, plain_layer
from isobit.library.placements import (
    SAMPLE_LENGTHS,
    in_every_storage_and_thread_count,
    put_among_random,
)
from isobit.library.subjects import Subject
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples

MICRO_BATCHES = (1, 2, 4)
CUTS = (2, 4, 8)
STOCK_FACTOR = 1.25


def tokens(case: Case, rows: int, stream: int) -> tuple[Tensor, Tensor]:
    """Return (grad, x) whose products cancel along the rows: a change of order then changes the bits."""
    grad, x = (
        case.draw((rows, case.sizes[s]), stream + i, "wide") for i, s in enumerate(("n", "k"))
    )
    return mirror(grad, 0, -1), mirror(x, 0, 1)


def grad_rows(case: Case, rows: int, stream: int) -> Tensor:
    """Return [rows, n] whose products with the weight cancel."""
    return case.draw((rows, case.sizes["n"]), stream, leading=True)


def x_rows(case: Case, rows: int, stream: int) -> Tensor:
    """Return [rows, k] whose products with the weight cancel."""
    return case.draw((rows, case.sizes["k"]), stream, leading=True)


def columns(subject: Subject, case: Case, tally: Tally) -> None:
    """An output does not depend on which other outputs the same call computes."""
    layer, weight = layer_of(subject), case.arguments["weight"]
    x, grad, some = x_rows(case, 33, 5), grad_rows(case, 33, 6), weight[:321]
    tally.count(len(x))
    whole = layer.output(x, some, None)
    for start, stop in ((0, 1), (0, 17), (3, 80), (130, 321), (max(len(some) - 1, 0), len(some))):
        part = layer.output(x, some[start:stop].contiguous(), None)
        tally.same(part, whole[:, start:stop], f"y, outputs {start} to {stop}")
    whole = layer.input_grad(grad, weight)
    for start, stop in ((0, 1), (5, 70), (case.sizes["k"] - 1, case.sizes["k"])):
        part = layer.input_grad(grad, weight[:, start:stop].contiguous())
        tally.same(part, whole[:, start:stop], f"dX, inputs {start} to {stop}")


def samples(subject: Subject, case: Case, tally: Tally) -> None:
    """The gradients dW and db are one sum: packed, padded, in micro-batches, in any storage, on any threads."""
    layer, lengths = layer_of(subject), SAMPLE_LENGTHS
    grad, x = tokens(case, sum(lengths), 8)
    described = Samples.packed(lengths)
    tally.count(len(x))
    whole = layer.parameter_grads(grad, x, described)

    def same(found: Sequence[Tensor], where: str) -> None:
        for what, left, right in zip(("dW", "db"), whole, found, strict=True):
            tally.same(left, right, f"{what}, {where}")

    def compare(grad: Tensor, x: Tensor, described: Samples, where: str) -> None:
        same(layer.parameter_grads(grad, x, described), where)

    for side in ("left", "right"):
        padded = Samples.padded(lengths, width=max(lengths) + 5, side=side)
        moved = put_among_random(case, grad, padded, 9)
        compare(moved, put_among_random(case, x, padded, 10), padded, f"padded {side}")
    for size in MICRO_BATCHES:
        same(layer.accumulate(split(grad, x, lengths, size)), f"micro-batches of {size}")
    in_every_storage_and_thread_count(compare, (grad, x), described)


def split(grad: Tensor, x: Tensor, lengths: Sequence[int], size: int) -> list[Share]:
    """Split a packed batch into micro-batches of `size` samples."""
    shares, at = [], 0
    for first in range(0, len(lengths), size):
        described = Samples.packed(lengths[first : first + size], first=first, total=len(lengths))
        shares.append((grad[at : at + described.rows], x[at : at + described.rows], described))
        at += described.rows
    return shares


def ranks(subject: Subject, case: Case, tally: Tally) -> None:
    """K cut over ranks and merged equals the uncut y; N likewise for dX; for every cut that the plan allows."""
    layer, weight = layer_of(subject), case.arguments["weight"]
    x, grad = x_rows(case, 64, 11), grad_rows(case, 64, 12)
    x[-1, 0], grad[-1, 0] = torch.nan, torch.inf
    tally.count(len(x))
    whole = layer.output(x, weight, None), layer.input_grad(grad, weight)
    for count in CUTS:
        if FeaturePlan(case.sizes["k"]).count % count == 0:
            tally.same(layer.cut_output(x, weight, count), whole[0], f"y, K in {count}")
        if FeaturePlan(case.sizes["n"]).count % count == 0:
            tally.same(layer.cut_input_grad(grad, weight, count), whole[1], f"dX, N in {count}")


def frozen(subject: Subject, case: Case, tally: Tally) -> None:
    """A frozen weight gives the same bits, and a later write to it, even through .data, takes effect."""
    judged, weight = layer_of(subject), case.arguments["weight"]
    layer = torch.nn.Linear(case.sizes["k"], case.sizes["n"], bias=False, dtype=case.dtype)
    layer.weight.copy_(weight)
    decode = judged.decoder(layer)
    for count in (1, 8, 64, 257):
        x = x_rows(case, count, 13)
        tally.count(count)
        tally.same(decode(x), judged.output(x, layer.weight.clone(), None), f"{count} rows, frozen")
    layer.weight.data.copy_(case.draw((case.sizes["n"], case.sizes["k"]), 14, "wide"))
    x = x_rows(case, 8, 15)
    tally.same(
        decode(x), judged.output(x, layer.weight.clone(), None), "8 rows, after weight.data.copy_"
    )


def shapes(subject: Subject, case: Case, tally: Tally) -> None:
    """The output is [M, N], in the dtype of the inputs."""
    found = subject(*case.arguments.values())
    tally.count(case.rows)
    tally.compared += 1
    if found.shape != (case.sizes["rows"], case.sizes["n"]) or found.dtype != case.dtype:
        tally.fail(f"{list(found.shape)} {found.dtype} at {case.sizes}")


def error_bound(subject: Subject, case: Case, tally: Tally) -> None:
    """|y − exact| is at most the order's bound on the sum, plus the last rounding."""
    x, weight = case.arguments["x"], case.arguments["weight"]
    exact = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    last = torch.finfo(case.dtype).eps / 2
    allowed = (
        error_factor(case.sizes["k"], case.dtype) * magnitude * (1 + last) + last * exact.abs()
    )
    error = (subject(x, weight).double() - exact).abs()
    tally.count(case.rows)
    tally.true(error <= allowed + 2.0**-100, "error over the bound of the order", error / allowed)


def accuracy(subject: Subject, case: Case, tally: Tally) -> None:
    """Largest error against fp64 is at most 1.25 times stock's on the same inputs, for y, dX, dW and db."""
    count, (k, n) = 64, (case.sizes["k"], case.sizes["n"])
    tally.count(count)
    x, grad = case.draw((count, k), 16, "wide"), case.draw((count, n), 17, "wide")
    weight = case.draw((n, k), 18, "wide")  # ordinary sums, which do not cancel
    described = Samples.packed([count])
    exact = (
        x.double() @ weight.double().t(),
        grad.double() @ weight.double(),
        grad.double().t() @ x.double(),
        grad.double().sum(0),
    )
    ours, theirs = (
        (
            p.output(x, weight, None),
            p.input_grad(grad, weight),
            *p.parameter_grads(grad, x, described),
        )
        for p in (layer_of(subject), plain_layer(stock.linear))
    )
    for what, true, mine, other in zip(("y", "dX", "dW", "db"), exact, ours, theirs, strict=True):
        error, limit = ((t.double() - true).abs().max().item() for t in (mine, other))
        tally.within(error, STOCK_FACTOR * limit, mine.numel(), what)
