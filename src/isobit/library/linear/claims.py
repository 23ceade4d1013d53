"""Claims of matmul-kernel-v1: independent outputs, samples, ranks, packed weights, shapes, errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case, cancel, draw_values, mirror
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import THREADS
from isobit.foundation.records import Proof
from isobit.library import certificates, stock
from isobit.library.certificates import (
    Configuration,
    Question,
    error_factor,
    on_all_threads,
    prove_orders,
    sum_depth,
)
from isobit.library.claims import (
    SAMPLE_LENGTHS,
    Subject,
    in_every_storage_and_thread_count,
    put_among_random,
)
from isobit.library.linear.planted import LinearLayer, Share, layer_of, plain_layer
from isobit.ops.linear.targets import TARGETS, expected_order
from isobit.order.plan import FEATURE_CAP, FeaturePlan
from isobit.order.samples import Samples
from isobit.order.tree import Counter, Node, merge
from isobit.reveal.targets.tensor_target import TensorTarget

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


# Order certificates of the linear layer: y, dX, dW, db and frozen weights, at many shapes.

# (K, N) of the linear layers of a model of 0.6 billion parameters; Q, K and V are one layer, gate and up another.
LAYERS = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
PROVED = (LAYERS[0], LAYERS[3])  # all four behind ./check --full
# Each takes another path: one row, few rows, a tail of the tile engine, a second tile, a last row alone.
ROWS = (1, 5, 33, 130, 257)
TOKENS = (2, 11, 255, 256, 257, 515, 1030)
TOKEN_WIDTHS: dict[str, list[dict[str, int]]] = {
    "weight_grad": [{"n": 64, "m": 8}, {"n": 200, "m": 65}],
    "bias_grad": [{"n": 64}, {"n": 200}],
}
FROZEN = (333, 1024, 1032)
WIDTHS = (1, 17, 64, 65, 200)
DTYPES = (torch.float32, torch.bfloat16)


def question(
    subject: Subject, name: str, dtype: torch.dtype, shapes: Sequence[Configuration]
) -> Question:
    """Ask for the defined order of one of the layer's sums, on every number of threads."""

    def target(**shape: int) -> TensorTarget:
        if name == "frozen":
            return TARGETS[name](dtype=dtype, decoder=layer_of(subject).decoder, **shape)
        function = subject.output if isinstance(subject, LinearLayer) else subject
        return TARGETS[name](dtype=dtype, function=function, **shape)

    k = shapes[0]["k"]
    what = f"{name} {dtype} over {k} terms"
    return Question(what, target, on_all_threads(shapes), expected_order(name, k, dtype))


def prove(questions: Iterator[Question], covers: str) -> Proof:
    """Certify the orders and replay them to the bit: then bits cannot differ for any finite input."""
    covers = f"all finite inputs: {covers}, {list(THREADS)} threads"
    return prove_orders(questions, covers, replayed=True)


def prove_rows(
    subject: Subject,
    layers: Sequence[tuple[int, int]] = PROVED,
    rows: Sequence[int] = ROWS,
) -> Proof:
    """Certify y and dX over row counts and threads."""

    def questions() -> Iterator[Question]:
        for k, n in layers:
            for dtype in DTYPES:
                forward: list[Configuration] = [{"k": k, "n": n, "m": m} for m in rows]
                yield question(subject, "linear", dtype, forward)
                backward = [{"k": n, "n": k, "m": m} for m in rows]
                yield question(subject, "input_grad", dtype, backward)

    covers = f"y and dX of layers {list(layers)} at {list(rows)} rows, bfloat16 and float32"
    return prove(questions(), covers)


def prove_samples(subject: Subject) -> Proof:
    """Certify dW and db over the tokens of a sample, at several widths."""

    def questions() -> Iterator[Question]:
        for dtype in (*DTYPES, torch.float16):
            for tokens in TOKENS:
                for name, widths in TOKEN_WIDTHS.items():
                    yield question(subject, name, dtype, [{"k": tokens, **w} for w in widths])

    covers = f"dW and db of samples of {list(TOKENS)} tokens, bfloat16, float16 and float32"
    return prove(questions(), covers)


def prove_columns(subject: Subject) -> Proof:
    """Certify y at several numbers of outputs; every column must have the bits of the probed one."""
    shapes = [{"k": 1032, "n": n, "m": 33} for n in WIDTHS]
    questions = (question(subject, "linear", dtype, shapes) for dtype in DTYPES)
    return prove(questions, f"y of K = 1032 at {list(WIDTHS)} outputs, bfloat16 and float32")


def prove_frozen(subject: Subject) -> Proof:
    """Certify y with packed weights."""
    questions = (
        question(subject, "frozen", dtype, [{"k": k, "m": m} for m in ROWS])
        for dtype in DTYPES
        for k in FROZEN
    )
    covers = f"y of frozen layers, K in {list(FROZEN)} at {list(ROWS)} rows, bfloat16 and float32"
    return prove(questions, covers)


# Proofs about the linear layer besides its orders: shares of the plan, output shapes, and the error bound.

Pair = Any
EXTENTS = (512, 1024, 4096)
SIZES = range(9)
BOUNDED = (1, 64, 333, 512, 1024, 1032, 2048, 3072, 4096, 12288)


def pair(left: Pair, right: Pair) -> Pair:
    """Return an addition as a term."""
    return (left, right)


def prove_cuts(subject: Subject) -> Proof:
    """Enumerate the ways to share segments out: the shares' roots merge to the whole tree; kernels agree."""
    engine, cases, count = "enumeration of the plan", 0, 1
    while count <= FEATURE_CAP:
        whole = merge(list(range(count)), pair)
        for shares in compositions(count):
            cases += 1
            if merge_shares(shares) != [whole]:
                failure = f"{count} segments shared as {shares} merge to another tree"
                return Proof(engine, "", cases, failure)
        count *= 2
    for extent, parts in itertools.product(EXTENTS, (2, 4, 8)):
        if FeaturePlan(extent).count % parts == 0:
            cases += 1
            if not cut_is_whole(subject, extent, parts):
                return Proof(engine, "", cases, f"K = {extent} over {parts} ranks differs")
    covers = (
        f"every extent, since a plan has at most {FEATURE_CAP} segments: all ways to share them out "
        f"in order; the kernel itself at K = {list(EXTENTS)}"
    )
    return Proof(engine, covers, cases)


def compositions(count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut a run of segments into runs."""
    for marks in itertools.product((False, True), repeat=count - 1):
        sizes, size = [], 1
        for mark in marks:
            if mark:
                sizes.append(size)
                size = 0
            size += 1
        yield (*sizes, size)


def merge_shares(shares: Sequence[int]) -> list[Pair]:
    """Merge each share by itself, then their roots."""
    total: Counter[Pair] = Counter(pair)
    at = 0
    for size in shares:
        share: Counter[Pair] = Counter(pair)
        for segment in range(at, at + size):
            share.push(Node(0, segment), segment)
        for node, value in share:
            total.push(node, value)
        at += size
    return [value for _, value in total]


def cut_is_whole(subject: Subject, extent: int, ranks: int) -> bool:
    """Compare a product whose terms cancel, cut over ranks and uncut."""
    generator = torch.Generator().manual_seed(extent)
    x = cancel(draw_values((9, extent), "wide", generator), True)
    weight = cancel(draw_values((64, extent), "wide", generator), False)
    layer = layer_of(subject)
    return torch.equal(layer.cut_output(x, weight, ranks), layer.output(x, weight, None))


def prove_shapes(subject: Subject) -> Proof:
    """Enumerate every small shape, with data and on the meta device."""
    engine, cases = "enumeration of the real kernel", 0
    for m, k, n in itertools.product(SIZES, SIZES, SIZES):
        for device in ("cpu", "meta"):
            cases += 1
            found = subject(torch.ones(m, k, device=device), torch.ones(n, k, device=device)).shape
            if tuple(found) != (m, n):
                return Proof(engine, "", cases, f"[{m}, {k}] by [{n}, {k}] gives {list(found)}")
    return Proof(engine, f"every M, K and N from 0 to {SIZES[-1]}", cases)


def prove_error_bound(subject: Subject) -> Proof:
    """Bound the error in interval arithmetic: the order is certified, so its bound is the kernel's."""
    shapes = [{"k": 1032, "n": 64, "m": m} for m in (1, 33)]
    order = prove((question(subject, "linear", dtype, shapes) for dtype in DTYPES), "")
    if not order.kept:
        return Proof(certificates.INTERVALS, "", order.cases, order.failure)
    worst = 0.0
    for dtype, extent in itertools.product(DTYPES, BOUNDED):
        factor = error_factor(extent, dtype)
        if not 0 < factor < 1.001 * certificates.U * sum_depth(extent, dtype):
            return Proof(certificates.INTERVALS, "", len(BOUNDED), f"K = {extent}: {factor}")
        worst = max(worst, factor)
    covers = (
        f"all inputs whose products and sums neither overflow nor underflow, K in {list(BOUNDED)}: "
        "the error before the last rounding is at most ((1 + 2^-24)^d − 1)·Σ|x·w|, d the depth of "
        f"the order; at most {worst:.3g}·Σ|x·w|"
    )
    return Proof(certificates.INTERVALS, covers, 2 * len(BOUNDED) + order.cases)
