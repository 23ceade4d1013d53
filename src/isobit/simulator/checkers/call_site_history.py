"""Call sites: the first collective that ranks reach from different places of the program.

[Note: one call late]
Ranks meet in a collective by its number in the group. A collective that one rank calls too often, or not at all, is
paired with the next one of the other ranks. If both have one kind and shape, they complete, with wrong data, and the
calls of the ranks are shifted from there on; the mismatch or the deadlock comes later. The place where the ranks came
apart is the first collective that they called from different lines. Such a collective may be right, as a broadcast
under `if rank == 0: … else: …` is, so it is never a finding of its own: it is a note of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isobit.foundation.majority import count_votes, name_ranks
from isobit.simulator.operations import GroupKey

Stacks = Mapping[
    int, Sequence[str]
]  # of each rank its frames as `file:line in function`, innermost first
MOST_SHOWN = 4  # places of one collective that are spelled out


@dataclass(frozen=True)
class Apart:
    """A collective that ranks called from different places."""

    number: int
    call: str
    stacks: Stacks

    def __str__(self) -> str:
        """Return the collective, and the outermost place of each rank that differs."""
        places = differing_places(self.stacks)
        shown = [
            f"{name_ranks(ranks)} at {places[ranks[0]]}"
            for ranks in count_votes(places).groups[:MOST_SHOWN]
        ]
        return f"{self.call}: {', '.join(shown)}"


def differing_places(stacks: Stacks) -> dict[int, str]:
    """Return, of each rank, the outermost frame that differs between ranks; the innermost of a shorter stack."""
    outward = {rank: tuple(reversed(stack)) for rank, stack in stacks.items() if stack}
    at = 0
    while all(len(stack) > at + 1 for stack in outward.values()) and (
        len({without_folder(stack[at]) for stack in outward.values()}) == 1
    ):
        at += 1
    return {rank: stack[min(at, len(stack) - 1)] for rank, stack in outward.items()}


def without_folder(frame: str) -> str:
    """Return a frame without the folder of its file, which may differ between hosts."""
    return re.split(r"[/\\]", frame)[-1]


class CallSites:
    """Of each group, the first collective whose call sites differ, and the first of those that differ in a row."""

    def __init__(self) -> None:
        """Start without any collective."""
        self._first: dict[GroupKey, Apart] = {}
        self._since: dict[GroupKey, Apart] = {}

    def note(self, group: GroupKey, number: int, call: str, stacks: Stacks) -> None:
        """Note a collective that all members have called. Numbers of a group must increase."""
        held = {tuple(stack) for stack in stacks.values() if stack}
        if len(held) < 2 or len({tuple(map(without_folder, stack)) for stack in held}) < 2:
            self._since.pop(group, None)
            return
        apart = Apart(number, call, stacks)
        self._first.setdefault(group, apart)
        self._since.setdefault(group, apart)

    def before(self, group: GroupKey, number: int) -> str:
        """Return where ranks came apart before a collective, in words, or nothing."""
        first, since = self._first.get(group), self._since.get(group)
        found = list(
            dict.fromkeys(
                str(apart)
                for apart in (first, since)
                if apart is not None and apart.number < number
            )
        )
        if not found:
            return ""
        again = "".join(f"; again from {words}" for words in found[1:])
        return f"ranks call from different lines first in {found[0]}{again}"
