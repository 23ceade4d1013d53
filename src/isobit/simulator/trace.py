"""The trace of a run: its events, their digest, and where a replay departs from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from isobit.errors import ReplayError
from isobit.simulator.faults import Fault, fault_from

# (rank, virtual microseconds, what); what is "run", a call, "done …", "left" or "fault …".
Event = tuple[int, int, str]


@dataclass
class Trace:
    """The settings of a run and its events, in the order in which they happened.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.simulator import World, replay
        >>> trace = World(2, seed=1).run(lambda rank: dist.barrier()).trace
        >>> replay(trace, lambda rank: dist.barrier()).digest == trace.digest
        True
    """

    ranks: int
    seed: int
    delays: bool
    faults: tuple[Fault, ...] = ()
    sends: str = "buffered"
    events: list[Event] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The BLAKE3 digest of the events: equal digests mean equal schedules."""
        return blake3(
            "\n".join(f"{rank} {at} {what}" for rank, at, what in self.events).encode()
        ).hexdigest()[:32]

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        kept = {
            **asdict(self),
            "faults": [{"kind": type(fault).__name__, **asdict(fault)} for fault in self.faults],
        }
        Path(path).write_text(json.dumps(kept))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` wrote."""
        kept: dict[str, Any] = json.loads(Path(path).read_text())
        events = [(int(rank), int(at), str(what)) for rank, at, what in kept.pop("events")]
        faults = tuple(fault_from(words) for words in kept.pop("faults"))
        return cls(**kept, faults=faults, events=events)


class Recorder:
    """Write the trace of a run, and find where it first departs from a recorded one."""

    def __init__(self, trace: Trace, recorded: Trace | None = None) -> None:
        """Record into `trace`, and compare with `recorded` if it is given."""
        self.trace = trace
        self.departure: ReplayError | None = None
        self._events, self._recorded = trace.events, None if recorded is None else recorded.events

    def note(self, rank: int, at: int, what: str) -> None:
        """Append an event and compare it with the recorded one."""
        event = (rank, at, what)
        if self._recorded is not None and self.departure is None:
            place = len(self._events)
            wanted = self._recorded[place] if place < len(self._recorded) else None
            if event != wanted:
                self.departure = departure(place, wanted, event)
        self._events.append(event)

    def finish(self) -> None:
        """Compare the ends: a run that has fewer events than the recorded one departs too."""
        place = len(self._events)
        if self._recorded is not None and self.departure is None and place < len(self._recorded):
            self.departure = departure(place, self._recorded[place], None)


def departure(place: int, wanted: Event | None, event: Event | None) -> ReplayError:
    """Build the error for the first event that differs; None is the end of a trace."""
    shown = [
        ("the end" if e is None else f"rank {e[0]} at {e[1]} µs: {e[2]}") for e in (wanted, event)
    ]
    return ReplayError(
        expected=f"event {place} of the trace: {shown[0]}",
        received=shown[1],
        remedy="run the program that was recorded, with the same arguments and versions",
        ranks=sorted({e[0] for e in (wanted, event) if e is not None}),
    )
