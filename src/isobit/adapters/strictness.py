"""Strict mode: the first call of each kind is watched, and a stock operator that carries an order is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from isobit.adapters.coverage import observe, refuse_uncovered

Output = TypeVar("Output")


class Strictness:
    """Which kinds of call of one model were watched already."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.watched: set[tuple[Any, ...]] = set()

    def run(self, kind: tuple[Any, ...], call: Callable[[], Output]) -> Output:
        """The call's output; of a new kind, only where every operator that carries an order was ours."""
        if not self.wanted or kind in self.watched:
            return call()
        with observe() as seen:
            output = call()
        refuse_uncovered(seen, output)
        self.watched.add(kind)
        return output
