"""What matmul-kernel-v1 claims beyond the library: outputs beside outputs, samples, ranks, packed weights, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case, mirror
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.library.linear import proofs
from isobit.library.linear.shares import Share, parts_of, plain_parts
from isobit.machine import thread_count
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples

Subject = Callable[..., Any]

MICRO_BATCHES = (1, 2, 4)
CUTS = (2, 4, 8, 16)
# Unequal, one empty, one beyond a leaf of 256 tokens, one odd beyond 512.
SAMPLE_LENGTHS = (11, 16, 0, 300, 13, 19, 1, 515)


def tokens(case: Case, rows: int, stream: int) -> tuple[Tensor, Tensor]:
    """(grad, x) whose products cancel along the rows, so that a change of order shows through any rounding."""
    grad, x = (
        case.draw((rows, case.sizes[s]), stream + i, "wide") for i, s in enumerate(("n", "k"))
    )
    return mirror(grad, 0, -1), mirror(x, 0, 1)


def grad_rows(case: Case, rows: int, stream: int) -> Tensor:
    """[rows, n] whose products with the weight cancel."""
    return case.draw((rows, case.sizes["n"]), stream, leading=True)


def x_rows(case: Case, rows: int, stream: int) -> Tensor:
    """[rows, k], likewise."""
    return case.draw((rows, case.sizes["k"]), stream, leading=True)


def columns(subject: Subject, case: Case, tally: Tally) -> None:
    """An output does not depend on which other outputs are computed beside it."""
    parts, weight = parts_of(subject), case.arguments["weight"]
    x, grad, some = x_rows(case, 33, 5), grad_rows(case, 33, 6), weight[:321]
    tally.count(len(x))
    whole = parts.output(x, some, None)
    for start, stop in ((0, 1), (0, 17), (3, 80), (130, 321), (max(len(some) - 1, 0), len(some))):
        part = parts.output(x, some[start:stop].contiguous(), None)
        tally.same(part, whole[:, start:stop], f"y, outputs {start} to {stop}")
    whole = parts.input_grad(grad, weight)
    for start, stop in ((0, 1), (5, 70), (case.sizes["k"] - 1, case.sizes["k"])):
        part = parts.input_grad(grad, weight[:, start:stop].contiguous())
        tally.same(part, whole[:, start:stop], f"dX, inputs {start} to {stop}")


def samples(subject: Subject, case: Case, tally: Tally) -> None:
    """dW and db of a batch are one sum: packed, padded, in micro-batches, in any storage, by any threads."""
    parts, lengths = parts_of(subject), SAMPLE_LENGTHS
    grad, x = tokens(case, sum(lengths), 8)
    described = Samples.packed(lengths)
    tally.count(len(x))
    whole = parts.parameter_grads(grad, x, described)

    def compare(found: Sequence[Tensor], where: str) -> None:
        for what, left, right in zip(("dW", "db"), whole, found, strict=True):
            tally.same(left, right, f"{what}, {where}")

    for side in ("left", "right"):
        padded = Samples.padded(lengths, width=max(lengths) + 5, side=side)
        compare(
            parts.parameter_grads(
                spread(case, grad, padded, 9), spread(case, x, padded, 10), padded
            ),
            f"padded {side}",
        )
    for size in MICRO_BATCHES:
        compare(parts.accumulate(split(grad, x, lengths, size)), f"micro-batches of {size}")
    for name, store in LAYOUTS.items():
        compare(parts.parameter_grads(store(grad), store(x), described), f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            compare(parts.parameter_grads(grad, x, described), f"{threads} threads")


def spread(case: Case, packed: Tensor, described: Samples, stream: int) -> Tensor:
    """Packed rows put where padded samples are, among random rows."""
    out = case.draw((described.rows, packed.shape[1]), stream, "wide")
    at = 0
    for start, length in described.spans:
        out[start : start + length] = packed[at : at + length]
        at += length
    return out


def moved(described: Samples) -> tuple[tuple[tuple[int, int], ...], int, int, int]:
    """The same samples in the same order, the last one first in memory, with a row of padding before each."""
    spans, at = [], 1
    for _, length in reversed(described.spans):
        spans.append((at, length))
        at += length + 1
    return tuple(reversed(spans)), at, 0, len(spans)


def split(grad: Tensor, x: Tensor, lengths: Sequence[int], size: int) -> list[Share]:
    """A packed batch as micro-batches of `size` samples."""
    shares, at = [], 0
    for first in range(0, len(lengths), size):
        described = Samples.packed(lengths[first : first + size], first=first, of=len(lengths))
        shares.append((grad[at : at + described.rows], x[at : at + described.rows], described))
        at += described.rows
    return shares


def ranks(subject: Subject, case: Case, tally: Tally) -> None:
    """K cut over ranks and merged equals the uncut y; N likewise for dX; for every cut that the plan allows."""
    parts, weight = parts_of(subject), case.arguments["weight"]
    x, grad = x_rows(case, 64, 11), grad_rows(case, 64, 12)
    x[-1, 0], grad[-1, 0] = torch.nan, torch.inf
    tally.count(len(x))
    whole = parts.output(x, weight, None), parts.input_grad(grad, weight)
    for count in CUTS:
        if FeaturePlan(case.sizes["k"]).count % count == 0:
            tally.same(parts.cut_output(x, weight, count), whole[0], f"y, K in {count}")
        if FeaturePlan(case.sizes["n"]).count % count == 0:
            tally.same(parts.cut_input_grad(grad, weight, count), whole[1], f"dX, N in {count}")


def frozen(subject: Subject, case: Case, tally: Tally) -> None:
    """A weight kept for decoding gives the same bits, and a later write to it, even by .data, is seen."""
    parts, weight = parts_of(subject), case.arguments["weight"]
    layer = torch.nn.Linear(case.sizes["k"], case.sizes["n"], bias=False, dtype=case.dtype)
    layer.weight.copy_(weight)
    decode = parts.decoder(layer)
    for count in (1, 8, 64, 257):
        x = x_rows(case, count, 13)
        tally.count(count)
        tally.same(decode(x), parts.output(x, layer.weight.clone(), None), f"{count} rows, frozen")
    layer.weight.data.copy_(case.draw((case.sizes["n"], case.sizes["k"]), 14, "wide"))
    x = x_rows(case, 8, 15)
    tally.same(
        decode(x), parts.output(x, layer.weight.clone(), None), "8 rows, after weight.data.copy_"
    )


def stock(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The control."""
    return F.linear(x, weight, bias)


def shapes(subject: Subject, case: Case, tally: Tally) -> None:
    """[M, N], in the dtype of the inputs."""
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
        proofs.error_factor(case.sizes["k"], case.dtype) * magnitude * (1 + last)
        + last * exact.abs()
    )
    error = (subject(x, weight).double() - exact).abs()
    tally.count(case.rows)
    tally.true(error <= allowed + 2.0**-100, "error over the bound of the order", error / allowed)


BESIDE_STOCK = 1.25


def accuracy(subject: Subject, case: Case, tally: Tally) -> None:
    """Largest error against fp64 is at most 1.25 times stock's on the same inputs, for y, dX, dW and db."""
    count, (k, n) = 64, (case.sizes["k"], case.sizes["n"])
    tally.count(count)
    x, grad = case.draw((count, k), 16, "wide"), case.draw((count, n), 17, "wide")
    weight, described = (
        case.draw((n, k), 18, "wide"),
        Samples.packed([count]),
    )  # ordinary sums, which do not cancel
    exact = (
        x.double() @ weight.double().t(),
        grad.double() @ weight.double(),
        grad.double().t() @ x.double(),
        grad.double().sum(0),
    )
    ours, stock = (
        (
            p.output(x, weight, None),
            p.input_grad(grad, weight),
            *p.parameter_grads(grad, x, described),
        )
        for p in (parts_of(subject), plain_parts(F.linear))
    )
    for what, true, mine, theirs in zip(("y", "dX", "dW", "db"), exact, ours, stock, strict=True):
        error, limit = ((t.double() - true).abs().max().item() for t in (mine, theirs))
        tally.within(error, BESIDE_STOCK * limit, mine.numel(), what)


def refused_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls that no kernel takes."""
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    yield "K of x and weight differ", (x, torch.ones(4, 5)), {}
    yield "a weight that is a vector", (x, torch.ones(3)), {}
    yield "a bias of another size", (x, weight, torch.ones(3)), {}
    yield "two dtypes", (x, weight.bfloat16()), {}
    yield "integers", (x.int(), weight.int()), {}
    yield "a sparse input", (x.to_sparse(), weight), {}
    yield "a scalar", (torch.tensor(1.0), weight), {}
    yield "samples that do not describe the rows", (x, weight), {"samples": Samples.packed([3])}
