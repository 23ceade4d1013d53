"""The orders of a linear layer's sums: which target shows each, what it must show, and certificates as proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import isobit
from isobit.contracts.judge.transforms import THREADS
from isobit.library.linear.shares import LinearParts, parts_of
from isobit.machine import thread_count
from isobit.ops import dispatch
from isobit.order.addition import digest
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples
from isobit.records import Proof
from isobit.reveal import targets
from isobit.reveal.certificate import certify
from isobit.reveal.targets.tensor_target import TensorTarget


def frozen(
    k: int,
    m: int = 1,
    n: int = 200,
    dtype: torch.dtype = torch.float32,
    function: Callable[..., Any] = isobit.linear,
) -> TensorTarget:
    """y over k of a frozen layer. A write to its weight means packing anew, so probes stand in the rows of x."""
    layer = torch.nn.Linear(k, n, bias=False, dtype=dtype).requires_grad_(False)
    decode = parts_of(function).decoder(layer)
    x = torch.zeros(m, k, dtype=dtype)

    def run() -> torch.Tensor:
        return decode(x)

    name = f"isobit.nn.Linear, frozen, {m}×{k} by {n}×{k}"
    return TensorTarget(name, x, lambda: run()[:, -1], "product", layer.weight, everywhere=run)


# Every row and column of ours must have the bits of the one that is read.
TARGETS: dict[str, Callable[..., TensorTarget]] = {
    "linear": partial(targets.linear, function=isobit.linear, row=None),
    "frozen": frozen,
    "input_grad": partial(targets.input_grad, function=isobit.linear, row=None),
    "weight_grad": partial(targets.weight_grad, function=isobit.linear, everywhere=True),
    "bias_grad": partial(targets.bias_grad, function=isobit.linear),
}


TOKEN_WIDTHS = {
    "weight_grad": [{"n": 64, "m": 8}, {"n": 200, "m": 65}],
    "bias_grad": [{"n": 64}, {"n": 200}],
}


def expected_order(name: str, k: int, dtype: torch.dtype) -> str:
    """The digest of the order that a sum over k terms (features, or the tokens of one sample) must show."""
    features = name in ("linear", "frozen", "input_grad")
    segments = FeaturePlan(k).segments if features else Samples.packed([k]).segments
    return digest(
        expected_tree(segments, "striped" if name == "bias_grad" else dispatch.engine_of(dtype))
    )


def with_threads(target: TensorTarget, threads: int) -> TensorTarget:
    """The same, each call made with so many threads."""

    def bound(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with thread_count(threads):
                return function()

        return run

    everywhere = None if target.everywhere is None else bound(target.everywhere)
    return replace(target, run=bound(target.run), everywhere=everywhere)


# (K, N) of the linear layers of a model of 0.6 billion parameters; Q, K and V are one layer, gate and up another.
LAYERS = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
PROVED = (LAYERS[0], LAYERS[3])  # all four behind ./check --full
# A row, few rows, a tail of the tile engine, a second tile, a last row alone: each takes another path.
ROWS = (1, 5, 33, 130, 257)
TOKENS = (2, 11, 255, 256, 257, 515, 1030)
FROZEN = (333, 1024, 1032)
DTYPES = (torch.float32, torch.bfloat16)

Question = tuple[str, torch.dtype, Sequence[Mapping[str, int]]]


def prove_rows(
    subject: Callable[..., Any],
    layers: Sequence[tuple[int, int]] = PROVED,
    rows: Sequence[int] = ROWS,
) -> Proof:
    """y and dX over row counts and threads."""

    def questions() -> Iterator[Question]:
        for k, n in layers:
            for dtype in DTYPES:
                yield "linear", dtype, [{"k": k, "n": n, "m": m} for m in rows]
                yield "input_grad", dtype, [{"k": n, "n": k, "m": m} for m in rows]

    return prove_orders(
        subject, questions(), f"y and dX of layers {list(layers)} at {list(rows)} rows"
    )


def prove_samples(subject: Callable[..., Any]) -> Proof:
    """dW and db over the tokens of a sample, at several widths."""

    def questions() -> Iterator[Question]:
        for dtype in (*DTYPES, torch.float16):
            for tokens in TOKENS:
                for name, widths in TOKEN_WIDTHS.items():
                    yield name, dtype, [{"k": tokens, **width} for width in widths]

    return prove_orders(subject, questions(), f"dW and db of samples of {list(TOKENS)} tokens")


def prove_columns(subject: Callable[..., Any]) -> Proof:
    """y at several numbers of outputs; every column of a call must have the bits of the one that is probed."""
    widths = (1, 17, 64, 65, 200)

    def questions() -> Iterator[Question]:
        for dtype in DTYPES:
            yield "linear", dtype, [{"k": 1032, "n": n, "m": 33} for n in widths]

    return prove_orders(subject, questions(), f"y of K = 1032 at {list(widths)} outputs")


def prove_frozen(subject: Callable[..., Any]) -> Proof:
    """y with packed weights."""

    def questions() -> Iterator[Question]:
        for dtype in DTYPES:
            for k in FROZEN:
                yield "frozen", dtype, [{"k": k, "m": m} for m in ROWS]

    return prove_orders(
        subject, questions(), f"y of frozen layers, K in {list(FROZEN)} at {list(ROWS)} rows"
    )


def prove_orders(subject: Callable[..., Any], questions: Iterator[Question], covers: str) -> Proof:
    """Every configuration has the defined order, replayed to the bit; so bits cannot differ, for any input."""
    function = subject.output if isinstance(subject, LinearParts) else subject
    count, failure, dtypes = 0, "", set()
    for name, dtype, shapes in questions:
        dtypes.add(str(dtype).removeprefix("torch."))

        def target(
            threads: int, name: str = name, dtype: torch.dtype = dtype, **shape: int
        ) -> TensorTarget:
            judged = subject if name == "frozen" else function
            return with_threads(TARGETS[name](dtype=dtype, function=judged, **shape), threads)

        found = certify(target, [{**shape, "threads": t} for shape in shapes for t in THREADS])
        count += found.count
        if (
            not found.matches(expected_order(name, shapes[0]["k"], dtype))
            or not found.classes[0].tree.replayed
        ):
            failure = f"{name} {dtype} over {shapes[0]['k']} terms: {found}"
            break
    said = f"all finite inputs: {covers}, {' and '.join(sorted(dtypes))}, {list(THREADS)} threads"
    return Proof("order certificate", said, count, failure)
