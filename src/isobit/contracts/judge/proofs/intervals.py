"""Rigorous interval arithmetic, and how many roundings a term of an order passes: what error bounds are made of."""

from __future__ import annotations

import importlib
from typing import Any

from isobit.errors import EngineError
from isobit.order.addition import Branch, steps_of


def load_arb() -> Any:
    """The type of intervals, which only proofs need."""
    try:
        return importlib.import_module("flint").arb
    except ImportError as error:
        raise EngineError(
            expected="python-flint, which bounds errors rigorously",
            received=str(error),
            remedy="pip install python-flint",
        ) from None


def depth_of(order: Branch) -> int:
    """Additions that a term passes, at most."""
    depth: list[int] = []
    for step in steps_of(order):
        depth.append(1 + max((depth[child] if child >= 0 else 0) for child in step))
    return depth[-1] if depth else 0
