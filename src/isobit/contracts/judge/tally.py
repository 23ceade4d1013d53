"""Counts what a relation compares, and keeps the first difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit import bits


class Tally:
    """Of one claim: cases, inputs, elements compared, elements that differ, and where the first one stands."""

    def __init__(self) -> None:
        self.cases = self.inputs = self.compared = self.differing = 0
        self.first = ""
        self.shares: dict[str, int] = {}  # of `compared`, by what a claim names

    def count(self, inputs: int) -> None:
        """A case of so many inputs (rows, or integers) begins."""
        self.cases += 1
        self.inputs += inputs

    def add(self, other: Tally) -> None:
        """What another has counted."""
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
        """Bit equality."""
        self.compared += max(left.numel(), right.numel())
        if not bits.equal(left, right):
            found = bits.first_difference(left, right)
            assert found is not None
            self.fail(f"{where}: {found}", found.count or max(left.numel(), 1))

    def true(self, kept: Tensor, where: str, values: Tensor | None = None) -> None:
        """Every element of a mask holds; `values` are shown where one does not."""
        self.compared += kept.numel()
        wrong = int((~kept).sum())
        if wrong:
            at = int((~kept).reshape(-1).to(torch.uint8).argmax())
            index = [int(i) for i in torch.unravel_index(torch.tensor(at), kept.shape)]
            shown = "" if values is None else f", {values.reshape(-1)[at].item()!r}"
            self.fail(f"{where}: {wrong} of {kept.numel()}, first at {index}{shown}", wrong)

    def within(self, error: float, limit: float, count: int, where: str) -> None:
        """An error that must not exceed a limit; NaN exceeds every limit."""
        self.compared += count
        if not error <= limit:
            self.fail(f"{where}: error {error:.3e}, limit {limit:.3e}", 1)

    def fail(self, where: str, count: int = 1) -> None:
        """Something differs."""
        self.differing += count
        self.first = self.first or where
