"""The orders of the linear operator's sums: which target shows each, what it must show, and their certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import isobit
from isobit import targets
from isobit.contracts.relations import Problem
from isobit.contracts.transforms import thread_count
from isobit.ops import dispatch
from isobit.order.addition import digest
from isobit.order.certify import Certificate, certify
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples
from isobit.targets.tensor_target import TensorTarget

# Every row and column of ours must have the bits of the one that is read.
TARGETS: dict[str, Callable[..., TensorTarget]] = {
    "linear": partial(targets.linear, function=isobit.linear, row=None),
    "input_grad": partial(targets.input_grad, function=isobit.linear, row=None),
    "weight_grad": partial(targets.weight_grad, function=isobit.linear, everywhere=True),
    "bias_grad": partial(targets.bias_grad, function=isobit.linear),
}


def expected_order(name: str, k: int, dtype: torch.dtype) -> str:
    """The digest of the order that a sum over k terms (features, or the tokens of one sample) must show."""
    features = name in ("linear", "input_grad")
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
    """y and dX over the problem's row counts and threads, dW and db over the row counts as tokens."""
    rows, threads = problem.row_counts, problem.threads
    shapes: dict[str, list[dict[str, Any]]] = {
        "linear": [{"k": problem.k, "n": problem.n, "m": m} for m in rows],
        "input_grad": [{"k": problem.n, "n": problem.k, "m": m} for m in rows],
    }
    for name, configurations in shapes.items():

        def target(threads: int, name: str = name, **shape: Any) -> TensorTarget:
            return with_threads(TARGETS[name](dtype=problem.dtype, **shape), threads)

        asked = [{**shape, "threads": count} for shape in configurations for count in threads]
        found = certify(target, asked)
        expected = expected_order(name, configurations[0]["k"], problem.dtype)
        yield OrderVerdict(f"{problem.subject_name} {name}", found, expected)


def certify_tokens(dtype: torch.dtype, counts: Sequence[int], threads: Sequence[int]) -> Iterator[OrderVerdict]:
    """dW and db over several numbers of tokens: each number is a problem of its own, cut over widths and threads."""
    for tokens in counts:
        widths = {"weight_grad": [{"n": 64, "m": 8}, {"n": 200, "m": 65}], "bias_grad": [{"n": 64}, {"n": 200}]}
        for name, shapes in widths.items():

            def target(threads: int, name: str = name, tokens: int = tokens, **shape: Any) -> TensorTarget:
                return with_threads(TARGETS[name](k=tokens, dtype=dtype, **shape), threads)

            found = certify(target, [{**shape, "threads": count} for shape in shapes for count in threads])
            subject = f"{tokens} tokens {str(dtype).removeprefix('torch.')} {name}"
            yield OrderVerdict(subject, found, expected_order(name, tokens, dtype))
