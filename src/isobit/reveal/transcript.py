"""Ask the probes of an earlier configuration again, all at once, instead of searching for the tree anew.

[Note: asking again]
The search for a tree and its arithmetic is a function of the target's answers and of nothing else: its random numbers
are seeded by the number of terms. So if another configuration gives the same answers, bit for bit, to all probes of the
first, then a search of its own would ask the same probes and find the same tree. Asking is cheaper: no probe waits for
the answer to another, so that a call holds as many as it has places. If one answer differs, nothing is concluded, and
the search runs. Replays are never taken from another configuration.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from isobit.errors import RevealError
from isobit.order.addition import Branch
from isobit.reveal.arithmetic import Arithmetic
from isobit.reveal.target import Scale, Session, Target, Terms

DOUBLE = 8  # bytes of an answer
# Everything besides the answers that the search reads of a target.
Kind = tuple[str, int, Scale, int]


@dataclass(frozen=True)
class Transcript:
    """The probes of one search, its answers as raw bits, and what it found."""

    probes: tuple[Terms, ...]
    answers: bytes
    branch: Branch
    arithmetic: Arithmetic | None


class Transcripts:
    """The first search of each kind of target, for the configurations of one kernel.

    All of them are searched for the order alone, or all for the arithmetic too.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._kept: dict[Kind, Transcript] = {}

    def keep(self, session: Session, branch: Branch, arithmetic: Arithmetic | None) -> None:
        """Keep what a search asked and found; probes of one fill and factor come together, for one call."""
        asked = sorted(session.heard, key=_by_call)
        answers = _raw([answer for _, answer in asked])
        found = Transcript(tuple(probe for probe, _ in asked), answers, branch, arithmetic)
        self._kept.setdefault(_kind_of(session.target), found)

    def ask_again(self, session: Session) -> Transcript | None:
        """Ask the probes of the first search; return it if every answer has the same bits, else None."""
        known = self._kept.get(_kind_of(session.target))
        if known is None:
            return None
        asked = Session(session.target, session.progress)
        for at in range(0, len(known.probes), Session.BATCH):
            some = known.probes[at : at + Session.BATCH]
            try:
                answers = _raw(asked.ask(some, "order"))
            except RevealError:  # which a search of its own may not meet
                return None
            if answers != known.answers[at * DOUBLE : (at + len(some)) * DOUBLE]:
                return None
        session.probes += asked.probes
        return known


def _kind_of(target: Target) -> Kind:
    return target.kind, target.n, target.scale, target.output_bits


def _by_call(heard: tuple[Terms, float]) -> tuple[float, float, int, int, int]:
    probe = heard[0]
    return probe.factor, probe.fill, probe.over.start, probe.over.stop, probe.over.step


def _raw(answers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(answers)}d", *answers)
