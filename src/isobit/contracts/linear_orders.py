"""The orders of the linear operator's sums: which target shows each, what it must show, and their certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

import isobit
from isobit import targets
from isobit.contracts.relations import Problem
from isobit.contracts.transforms import THREADS, thread_count
from isobit.ops import dispatch
from isobit.order.addition import digest
from isobit.order.certify import Certificate, certify
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples
from isobit.targets.tensor_target import TensorTarget


def frozen(k: int, m: int = 1, n: int = 200, dtype: torch.dtype = torch.float32) -> TensorTarget:
    """y over k of a frozen layer. A write to its weight means packing anew, so probes stand in the rows of x."""
    layer = isobit.nn.Linear(k, n, bias=False, dtype=dtype).requires_grad_(False)
    isobit.freeze(layer)
    x = torch.zeros(m, k, dtype=dtype)

    def run() -> torch.Tensor:
        return layer(x)  # type: ignore[no-any-return]

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


TOKEN_WIDTHS = {"weight_grad": [{"n": 64, "m": 8}, {"n": 200, "m": 65}], "bias_grad": [{"n": 64}, {"n": 200}]}


def expected_order(name: str, k: int, dtype: torch.dtype) -> str:
    """The digest of the order that a sum over k terms (features, or the tokens of one sample) must show."""
    features = name in ("linear", "frozen", "input_grad")
    segments = FeaturePlan(k).segments if features else Samples.packed([k]).segments
    return digest(expected_tree(segments, "striped" if name == "bias_grad" else dispatch.engine_of(dtype)))


def with_threads(target: TensorTarget, threads: int) -> TensorTarget:
    """The same, each call made with so many threads."""

    def bound(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with thread_count(threads):
                return function()

        return run

    everywhere = None if target.everywhere is None else bound(target.everywhere)
    return replace(target, run=bound(target.run), everywhere=everywhere)


@dataclass(frozen=True)
class OrderVerdict:
    """A certificate of one sum of one layer over its configurations, held against the defined order."""

    subject: str
    certificate: Certificate
    expected: str

    @property
    def kept(self) -> bool:
        """One order, the defined one, replayed to the bit."""
        return self.certificate.matches(self.expected) and self.certificate.classes[0].tree.replayed > 0


def certify_problem(problem: Problem) -> Iterator[OrderVerdict]:
    """y and dX over the problem's row counts and threads."""
    rows = problem.row_counts
    whole = {"linear": (problem.k, problem.n), "input_grad": (problem.n, problem.k)}
    for name, (k, n) in whole.items():
        shapes = [{"k": k, "n": n, "m": m} for m in rows]
        yield _certify(f"{problem.subject_name} {name}", name, problem.dtype, shapes, problem.threads)


def certify_frozen(dtype: torch.dtype, extents: Sequence[int], rows: Sequence[int]) -> Iterator[OrderVerdict]:
    """y with packed weights, over row counts."""
    for k in extents:
        shapes = [{"k": k, "m": m} for m in rows]
        yield _certify(f"{k} terms {dtype} frozen", "frozen", dtype, shapes, THREADS)


def certify_tokens(dtype: torch.dtype, counts: Sequence[int], threads: Sequence[int]) -> Iterator[OrderVerdict]:
    """dW and db over several numbers of tokens: each number is a problem of its own, cut over widths and threads."""
    for tokens in counts:
        for name, widths in TOKEN_WIDTHS.items():
            shapes = [{"k": tokens, **width} for width in widths]
            yield _certify(f"{tokens} tokens {dtype} {name}", name, dtype, shapes, threads)


def _certify(
    subject: str, name: str, dtype: torch.dtype, shapes: Sequence[dict[str, int]], threads: Sequence[int]
) -> OrderVerdict:
    """One sum over its shapes and threads, held against the defined order of its extent."""

    def target(threads: int, **shape: int) -> TensorTarget:
        return with_threads(TARGETS[name](dtype=dtype, **shape), threads)

    found = certify(target, [{**shape, "threads": count} for shape in shapes for count in threads])
    return OrderVerdict(subject, found, expected_order(name, shapes[0]["k"], dtype))
