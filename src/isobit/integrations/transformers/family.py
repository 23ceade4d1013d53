"""The record of one supported architecture: its classes and the function that computes each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """The classes of one architecture in transformers."""

    causal: type[nn.Module]
    model: type[nn.Module]
    forwards: dict[type[nn.Module], Forward]
