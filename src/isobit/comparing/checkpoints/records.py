"""What a comparison of two checkpoints found, as plain records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from isobit.foundation.records import Difference


@dataclass(frozen=True)
class TensorResult:
    """The comparison of one tensor.

    Attributes:
        name: its name.
        left: what was compared, on the left: a stored name, a slice of one, or several put together.
        right: the same on the right.
        mapped: how the names were mapped, "" if they are the same.
        dtype: of the left side.
        shape: of the left side.
        elements: of the left side.
        bytes: of the left side.
        digests: of both sides.
        difference: the first difference, None if equal.
        largest: the largest |difference| of numbers that are finite on both sides, None where none is.
    """

    name: str
    left: str
    right: str
    mapped: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    digests: tuple[str, str]
    difference: Difference | None = None
    largest: float | None = None


@dataclass(frozen=True)
class Tie:
    """A name of one checkpoint whose tensor the other stores under another name, and what shows it."""

    name: str
    kept: str
    shown_by: str


@dataclass(frozen=True)
class ValueResult:
    """A number or text that differs."""

    name: str
    left: str
    right: str


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints, compared.

    Attributes:
        paths: of both.
        kinds: formats of both.
        tensors: one result per tensor that both have.
        only_left: tensors and values without a counterpart.
        only_right: the same of the other.
        ties: names that are absent on one side because they are tied.
        values: how many numbers and texts both have.
        values_differ: those that differ.
        notes: what was decided, and what could not be mapped.
        common_only: whether names that only one of them has are left out of the verdict.
    """

    paths: tuple[str, str]
    kinds: tuple[str, str]
    tensors: tuple[TensorResult, ...]
    only_left: tuple[str, ...] = ()
    only_right: tuple[str, ...] = ()
    ties: tuple[Tie, ...] = ()
    values: int = 0
    values_differ: tuple[ValueResult, ...] = ()
    notes: tuple[str, ...] = ()
    common_only: bool = False

    @property
    def differing(self) -> tuple[TensorResult, ...]:
        """The tensors that differ."""
        return tuple(one for one in self.tensors if one.difference is not None)

    @property
    def elements(self) -> int:
        """How many elements were compared."""
        return sum(one.elements for one in self.tensors)

    @property
    def elements_differ(self) -> int:
        """How many elements differ; all of a tensor whose dtype or shape differs."""
        found = ((one.difference, one.elements) for one in self.tensors)
        return sum(n if d.count is None else min(n, d.count) for d, n in found if d is not None)

    @property
    def bytes(self) -> int:
        """How many bytes of each checkpoint were compared."""
        return sum(one.bytes for one in self.tensors)

    @property
    def mappings(self) -> dict[str, int]:
        """Every mapping of names that was used, and for how many tensors."""
        return dict(sorted(Counter(one.mapped for one in self.tensors if one.mapped).items()))

    @property
    def equal(self) -> bool:
        """Whether something was compared and nothing differs."""
        alone = not self.common_only and bool(self.only_left or self.only_right)
        return bool(self.tensors) and not (self.differing or self.values_differ or alone)

    @property
    def exit_code(self) -> int:
        """0 if equal, 1 if something differs, 2 if no tensor was compared."""
        return 2 if not self.tensors else 0 if self.equal else 1
