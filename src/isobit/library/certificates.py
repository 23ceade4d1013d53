"""Order certificates as proofs: a question names a sum and its order, `prove_orders` reveals and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.contracts.judge.transforms import THREADS
from isobit.errors import RevealError, in_one_line
from isobit.foundation.machine import thread_count
from isobit.foundation.records import Proof
from isobit.ops import dispatch
from isobit.order.addition import Branch, digest
from isobit.order.evaluate import expected_tree, feature_segments
from isobit.order.samples import Samples
from isobit.reveal.certificate import check_revealing
from isobit.reveal.targets.tensor_target import TensorTarget
from isobit.reveal.tree import Transcripts, reveal

ENGINE = "order certificate"
Configuration = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """Does `target(**configuration)` add in `order`, with one arithmetic, in every configuration?

    A configuration may have the key `threads`, which is not passed to `target`: calls then run on that
    many threads instead of one.
    """

    what: str
    target: Callable[..., TensorTarget]
    configurations: Sequence[Configuration]
    order: Branch

    def failure(self, replayed: bool) -> tuple[int, str]:
        """Return how many configurations were revealed, and what differs ("" if nothing does)."""
        expected, arithmetics, earlier = digest(self.order), set(), Transcripts()
        for count, configuration in enumerate(self.configurations, 1):
            shape = dict(configuration)
            threads = shape.pop("threads", 1)
            target = self.target(**shape)
            target = target if threads == 1 else target.with_threads(threads)
            try:
                tree = reveal(target, earlier=earlier)
            except RevealError as error:
                return count, f"{self.what}, {configuration}: {in_one_line(error)[:200]}"
            arithmetics.add(tree.digest)
            one = len(arithmetics) == 1 and not tree.unlike and (tree.replayed or not replayed)
            if tree.order_digest != expected or not one:
                return count, f"{self.what}, {configuration}: {tree}"
        return len(self.configurations), ""


def prove_orders(questions: Iterable[Question], covers: str, *, replayed: bool = False) -> Proof:
    """Reveal every configuration of every question; the first that differs is the failure.

    Args:
        questions: what is revealed, in order.
        covers: what the proof covers if it holds.
        replayed: require that order and arithmetic were replayed to the bit as well.
    """
    count = 0
    with thread_count(1):
        check_revealing()
        for question in questions:
            asked, failure = question.failure(replayed)
            count += asked
            if failure:
                return Proof(ENGINE, "", count, failure)
    return Proof(ENGINE, covers, count)


def on_all_threads(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Return each configuration once per thread count of the `threads` transform."""
    return [{**configuration, "threads": t} for configuration in configurations for t in THREADS]


def feature_order(width: int, engine: str, probed: int | None = None) -> Branch:
    """Return the order over `width` features; with `probed`, of its first terms alone."""
    order = expected_tree(feature_segments(width, engine), engine)
    if probed is None:
        return order
    first = _first_terms(order, probed)
    assert first is not None
    return first


def token_order(tokens: int, engine: str) -> Branch:
    """Return the order over the tokens of one sample."""
    return expected_tree(Samples.packed([tokens]).segments, engine)


def _first_terms(branch: Branch, count: int) -> Branch | None:
    if isinstance(branch, int):
        return branch if branch < count else None
    kept = tuple(b for b in (_first_terms(child, count) for child in branch) if b is not None)
    return kept if len(kept) > 1 else next(iter(kept), None)


# Error bounds over a certified order, evaluated in interval arithmetic.

INTERVALS = "interval bounds over the certified order"
U = 2.0**-24  # the unit roundoff of fp32
EXP_ERROR = (
    1.0  # ulp of the portable exponential; tests/ops/test_softmax.py tries every fp32 argument
)


def sum_depth(extent: int, dtype: torch.dtype) -> int:
    """Return the most roundings that a product passes on its way to a sum over `extent` features."""
    return 1 + depth_of(feature_order(extent, dispatch.engine_of(dtype)))


def error_factor(extent: int, dtype: torch.dtype) -> float:
    """Return (1 + u)^depth − 1, from above: the error of a sum is at most this times the sum of magnitudes."""
    arb = load_arb()
    bound = (arb(1) + arb(2) ** -24) ** sum_depth(extent, dtype) - 1
    return float(bound.abs_upper())


def prove_bound(
    order: Proof,
    bound: Callable[[int], float],
    sizes: Sequence[int],
    stated: tuple[int, float],
    covers: str,
) -> Proof:
    """Check that the order is certified and that the bound at the stated size is within the stated limit.

    Args:
        order: the certificate that the bound depends on.
        bound: the error bound of a sum over so many terms.
        sizes: sizes at which the bound is reported.
        stated: (size, limit) as the contract has it.
        covers: what is bounded; the bounds at `sizes` are appended.
    """
    if not order.kept:
        return Proof(INTERVALS, "", order.cases, order.failure)
    size, limit = stated
    if not 0 < bound(size) <= limit:
        failure = f"{covers} {bound(size):.3g} at {size}, limit {limit:.3g}"
        return Proof(INTERVALS, "", order.cases + len(sizes), failure)
    shown = ", ".join(f"{bound(n):.2g} at {n}" for n in sizes)
    return Proof(INTERVALS, f"{covers} {shown}", order.cases + len(sizes))
