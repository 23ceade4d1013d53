"""Reveal the orders of guilty operators at both shapes, and time isobit's operator in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from isobit.auditing.axes.variation import Variation
from isobit.auditing.judging.findings import Finding
from isobit.auditing.judging.second_executor import price_of
from isobit.auditing.orders.order_targets import reveal_both
from isobit.auditing.records import ORDER, Guilty
from isobit.auditing.replay.call import Call, TensorSpec, rebuild

SECONDS = 20.0  # for one operator


def add_orders(
    guilty: Sequence[Guilty],
    findings: Sequence[Finding],
    variation: Variation,
    count: int,
    say: Callable[[str, int, int], None],
) -> tuple[Guilty, ...]:
    """Return the guilty operators, the first `count` kinds of them with their orders and the price of isobit's.

    Operators that were called with the same shapes share one picture.
    """
    by_call = {finding.place.call: finding for finding in findings}
    seen: dict[object, tuple[object, str, float | None]] = {}
    found = []
    for one in guilty:
        key = (one.place.operator, one.shapes, one.kind)
        if key not in seen and len(seen) < count and one.kind == ORDER:
            say("revealing orders", len(seen), count)
            seen[key] = look(by_call[one.place.call], variation)
        orders, words, price = seen.get(key, (None, "", None))
        found.append(replace(one, orders=orders, why_no_order=words, price=price))
    return tuple(found)


def look(finding: Finding, variation: Variation) -> tuple[object, str, float | None]:
    """Return the certificate of both orders, what it shows or why there is none, and the price of isobit's operator."""
    with _disable_current_modes(), torch.no_grad():
        run = rebuild(finding.func, finding.run, finding.spec)
        variant = rebuild(finding.func, finding.variant, finding.spec)
        certificate, words = reveal_both(
            run, variant, variation.sides, budget=SECONDS, threads=variation.threads
        )
        return certificate, words, price_of(filled(finding))


def filled(finding: Finding) -> Call:
    """Return a call of the run's shapes with random numbers, for timing."""
    flat = [
        torch.randn_like(v.empty())
        if isinstance(v, TensorSpec) and v.dtype.is_floating_point
        else v
        for v in finding.run
    ]
    return rebuild(finding.func, flat, finding.spec)
