"""Examine the dumps of a hang and say what they show."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from isobit.errors import SimulationError
from isobit.simulator.autopsy.cause import blocked_ranks, disagreement, find_cause
from isobit.simulator.autopsy.collect import Evidence, collect
from isobit.simulator.autopsy.history import History, Meeting


@dataclass(frozen=True)
class Place:
    """A call in progress: who is in it, and who is not; `differs` if the ranks in it do not call the same."""

    call: str
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    states: dict[int, str] = field(default_factory=dict)
    differs: bool = False


@dataclass(frozen=True)
class Last:
    """The last call that a rank recorded."""

    call: str
    state: str
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Autopsy:
    """What the dumps of a folder show.

    Attributes:
        finding: The cause of the hang, or None if no call is in progress.
        places: The calls in progress.
        last: The last call of each rank with a dump.
        history: The calls of all ranks.
        evidence: What was read.
    """

    finding: SimulationError | None
    places: tuple[Place, ...]
    last: dict[int, Last]
    history: History
    evidence: Evidence

    @property
    def without_dump(self) -> tuple[int, ...]:
        """The ranks that a dump names, and that left none that can be read."""
        return tuple(rank for rank in self.history.world if rank not in self.history.dumps)


def examine(folder: Path) -> Autopsy:
    """Read the dumps of a folder and find the cause of the hang.

    Args:
        folder: A folder with the files of torch's flight recorder, one per rank.

    Returns:
        The cause, the calls in progress and the last call of each rank.

    Raises:
        ArgumentError: If the folder has no dump that can be read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isobit.simulator import examine
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         examine(Path(folder))
        ...     except isobit.ArgumentError as error:
        ...         print(error.expected.partition(",")[0])
        dumps of torch's flight recorder
    """
    evidence = collect(folder)
    history = History(evidence.dumps, evidence.broken)
    return Autopsy(find_cause(history), find_places(history), find_last(history), history, evidence)


def find_places(history: History) -> tuple[Place, ...]:
    """Return the calls in progress, each once."""
    ranks: dict[int, list[int]] = {}
    blocked = blocked_ranks(history)
    for rank, wait in blocked.items():
        ranks.setdefault(id(wait), []).append(rank)
    found = []
    for those in ranks.values():
        wait = blocked[those[0]]
        entries = {
            rank: wait.calls[rank][0] if isinstance(wait, Meeting) else wait.entry for rank in those
        }
        states = {rank: entry.state for rank, entry in entries.items()}
        differs = isinstance(wait, Meeting) and disagreement(wait) is not None
        found.append(Place(wait.describe(), tuple(those), tuple(wait.missing()), states, differs))
    return tuple(found)


def find_last(history: History) -> dict[int, Last]:
    """Return the last recorded call of each rank."""
    found = {}
    for rank, dump in history.dumps.items():
        if dump.entries:
            entry = dump.entries[-1]
            call = f"{entry.kind} number {entry.number} of group {entry.group!r}"
            state = "completed" if entry.done else entry.state
            found[rank] = Last(call, state, entry.stack)
    return found
