"""Rigorous interval arithmetic, and the number of additions a term passes: the basis of error bounds."""

from __future__ import annotations

import importlib
from typing import Any

from isobit.errors import EngineError
from isobit.order.addition import Branch, steps_of


def load_arb() -> Any:
    """Import the type of intervals."""
    try:
        return importlib.import_module("flint").arb
    except ImportError as error:
        raise EngineError(
            expected="python-flint, which bounds errors rigorously",
            received=str(error),
            remedy="pip install python-flint",
        ) from None


def depth_of(order: Branch) -> int:
    """Return the largest number of additions that a term passes."""
    depth: list[int] = []
    for step in steps_of(order):
        depth.append(1 + max((depth[child] if child >= 0 else 0) for child in step))
    return depth[-1] if depth else 0
