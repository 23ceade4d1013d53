"""Keyed sampling for generate() that keeps the log-probability of every token that it drew."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.integrations.transformers.sampling import KeyedSampling
from isobit.sampling.drawing import Drawn


class RecordedSampling(KeyedSampling):
    """A `KeyedSampling` that records what it draws.

    Attributes:
        drawn: What was drawn at each step of generate(), in order.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.drawn: list[Drawn] = []

    def draw(self, input_ids: Tensor, scores: Tensor) -> Drawn:
        """Draw, and keep tokens and log-probabilities."""
        found = super().draw(input_ids, scores)
        self.drawn.append(Drawn(found.tokens, found.logprobs, found.kept[:, :0]))
        return found
