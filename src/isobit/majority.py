"""Groups ranks by the value they hold, and finds the minority."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vote:
    """Members grouped by value, the largest group first; groups of one size by their lowest member."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def is_unanimous(self) -> bool:
        """All hold one value."""
        return len(self.groups) < 2

    @property
    def is_tied(self) -> bool:
        """No group is larger than all others, so that nobody can say who is wrong."""
        return len(self.groups) > 1 and len(self.groups[0]) == len(self.groups[1])

    @property
    def reference(self) -> int:
        """The member that the others are compared with: the lowest of the largest group."""
        return self.groups[0][0]


def count_votes(values: Sequence[Hashable]) -> Vote:
    """Group members by value; `values` has one value per member."""
    held: dict[Hashable, list[int]] = {}
    for member, value in enumerate(values):
        held.setdefault(value, []).append(member)
    return Vote(tuple(sorted(map(tuple, held.values()), key=lambda group: (-len(group), group[0]))))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 2, 4 to 7" with runs of three or more shortened."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"
