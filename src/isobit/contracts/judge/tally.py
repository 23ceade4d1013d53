"""Count what a relation compares, and keep the first difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit import bits


class Tally:
    """Counts of one claim: cases, inputs, elements compared, elements that differ; and the first difference."""

    def __init__(self) -> None:
        self.cases = self.inputs = self.compared = self.differing = 0
        self.first = ""
        self.shares: dict[str, int] = {}  # of `compared`, by transform

    def count(self, inputs: int) -> None:
        """Count a case of so many inputs (rows, or integers)."""
        self.cases += 1
        self.inputs += inputs

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.cases, self.inputs = self.cases + other.cases, self.inputs + other.inputs
        self.compared, self.differing = (
            self.compared + other.compared,
            self.differing + other.differing,
        )
        self.first = self.first or other.first
        for name, count in other.shares.items():
            self.shares[name] = self.shares.get(name, 0) + count

    def counts(self) -> dict[str, Any]:
        """Return the fields of a `ClaimRecord` that count."""
        return {
            "cases": self.cases,
            "inputs": self.inputs,
            "compared": self.compared,
            "differing": self.differing,
        }

    def same(self, left: Tensor, right: Tensor, where: str) -> None:
        """Compare the bits of two tensors."""
        self.compared += max(left.numel(), right.numel())
        if not bits.equal(left, right):
            found = bits.first_difference(left, right)
            assert found is not None
            self.fail(f"{where}: {found}", found.count or max(left.numel(), 1))

    def true(self, kept: Tensor, where: str, values: Tensor | None = None) -> None:
        """Require every element of a mask; `values` are shown for the first that is False."""
        self.compared += kept.numel()
        wrong = int((~kept).sum())
        if wrong:
            at = int((~kept).reshape(-1).to(torch.uint8).argmax())
            index = [int(i) for i in torch.unravel_index(torch.tensor(at), kept.shape)]
            shown = "" if values is None else f", {values.reshape(-1)[at].item()!r}"
            self.fail(f"{where}: {wrong} of {kept.numel()}, first at {index}{shown}", wrong)

    def within(self, error: float, limit: float, count: int, where: str) -> None:
        """Require an error within a limit; NaN is not within any."""
        self.compared += count
        if not error <= limit:
            self.fail(f"{where}: error {error:.3e}, limit {limit:.3e}", 1)

    def fail(self, where: str, count: int = 1) -> None:
        """Count a difference."""
        self.differing += count
        self.first = self.first or where
