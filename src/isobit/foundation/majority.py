"""Majority vote over ranks: group ranks by the value they hold, find those that differ, and name them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vote:
    """Ranks grouped by value.

    Attributes:
        groups: The largest group first; groups of one size are ordered by their lowest rank.
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def is_unanimous(self) -> bool:
        """Whether all ranks hold one value."""
        return len(self.groups) < 2

    @property
    def is_tied(self) -> bool:
        """Whether two groups are the largest, so that the count does not show which one is wrong."""
        return len(self.groups) > 1 and len(self.groups[0]) == len(self.groups[1])

    @property
    def has_majority(self) -> bool:
        """Whether the largest group is more than half of all ranks."""
        return bool(self.groups) and 2 * len(self.groups[0]) > sum(map(len, self.groups))

    @property
    def reference(self) -> int:
        """The rank that others are compared with: the lowest of the largest group."""
        return self.groups[0][0]

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks outside the largest group."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside the majority, or all ranks if there is no majority."""
        if self.has_majority:
            return self.others
        return tuple(sorted(rank for group in self.groups for rank in group))

    def __str__(self) -> str:
        """Return the groups as `[0 1] [2 3]`."""
        return " ".join(f"[{' '.join(map(str, group))}]" for group in self.groups)


def count_votes(values: Mapping[int, Hashable] | Sequence[Hashable]) -> Vote:
    """Group ranks by the value they hold.

    Args:
        values: The value of each rank, by rank or in rank order.

    Example:
        >>> vote = count_votes({0: "a", 1: "b", 2: "a"})
        >>> vote.groups, vote.has_majority, vote.suspects
        (((0, 2), (1,)), True, (1,))
    """
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    held: dict[Hashable, list[int]] = {}
    for rank, value in sorted(items, key=lambda item: item[0]):
        held.setdefault(value, []).append(rank)
    return Vote(tuple(sorted(map(tuple, held.values()), key=lambda group: (-len(group), group[0]))))


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words, with runs of three or more shortened.

    Example:
        >>> name_ranks([3]), name_ranks([4, 0, 2, 5, 6])
        ('rank 3', 'ranks 0, 2, 4–6')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    words = ", ".join(shown)
    return f"{'rank' if not words or words.isdigit() else 'ranks'} {words}"
