"""Order certificates of the linear layer: y, dX, dW, db and frozen weights, at many shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from isobit.contracts.judge.transforms import THREADS
from isobit.foundation.records import Proof
from isobit.library.certificates import Configuration, Question, on_all_threads, prove_orders
from isobit.library.linear.implementations import LinearLayer, layer_of
from isobit.library.subjects import Subject
from isobit.ops.linear.targets import TARGETS, expected_order
from isobit.reveal.targets.tensor_target import TensorTarget

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
