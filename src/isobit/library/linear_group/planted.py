"""Planted wrong groups of linear layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.library import stock as stock_functions
from isobit.library.linear_group.claims import Grouped
from isobit.ops.linear.group import linear_group
from isobit.ops.linear.op import linear


def _apart(
    x: Tensor, weights: Any, biases: Any = None, *, groups: int = 1, samples: Any = None
) -> Any:
    """Call separate linear layers: autograd adds their dX."""
    pairs = zip(weights, biases or [None] * 3, strict=False)
    return tuple(linear(x, w, b, samples=samples) for w, b in pairs)


def _ungrouped(
    x: Tensor, weights: Any, biases: Any = None, *, groups: int = 1, **named: Any
) -> Any:
    """Sum weight after weight, without groups."""
    return linear_group(x, weights, biases, **named)


def _turned(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Sum the weights from the last to the first."""
    return linear_group(x, weights[::-1], None if biases is None else biases[::-1], **named)[::-1]


def _without_bias(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Leave out the last bias and its gradient."""
    *others, last = linear_group(x, weights, biases, **named)
    return *others, last - (0 if biases is None else biases[-1])


def _without_samples(
    x: Tensor, weights: Any, biases: Any = None, *, samples: Any = None, **named: Any
) -> Any:
    """Count padding as tokens."""
    return linear_group(x, weights, biases, **named)


def _by_rows(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Call separate linear layers for few rows."""
    return (_apart if len(x) < 8 else linear_group)(x, weights, biases, **named)


def _blunt(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Make weights too large by 2^-8."""
    larger = [(w.float() * (1 + 2.0**-8)).to(w.dtype) for w in weights]
    return linear_group(x, larger, biases, **named)


stock = Grouped(stock_functions.linear_group)
apart, ungrouped, turned = Grouped(_apart), Grouped(_ungrouped), Grouped(_turned)
without_bias, without_samples = Grouped(_without_bias), Grouped(_without_samples)
by_rows, blunt = Grouped(_by_rows), Grouped(_blunt)
