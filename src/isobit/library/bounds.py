"""Error bounds over a certified order, evaluated in interval arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.foundation.records import Proof
from isobit.library.certificates import feature_order
from isobit.ops import dispatch

ENGINE = "interval bounds over the certified order"
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
        return Proof(ENGINE, "", order.cases, order.failure)
    size, limit = stated
    if not 0 < bound(size) <= limit:
        failure = f"{covers} {bound(size):.3g} at {size}, limit {limit:.3g}"
        return Proof(ENGINE, "", order.cases + len(sizes), failure)
    shown = ", ".join(f"{bound(n):.2g} at {n}" for n in sizes)
    return Proof(ENGINE, f"{covers} {shown}", order.cases + len(sizes))
