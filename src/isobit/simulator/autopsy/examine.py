"""Examine the dumps of a hang: read a folder of dumps, logs and stacks, and report what they show."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from isobit.errors import ArgumentError, SimulationError
from isobit.foundation.files import read_bytes
from isobit.foundation.majority import name_ranks
from isobit.foundation.plain_text import one_line
from isobit.simulator.autopsy.cause import History, Meeting, blocked_ranks, disagreement, find_cause
from isobit.simulator.autopsy.dumps import MOST_RANKS, Dump, read_dump

# What texts beside the dumps state: lines of NCCL's watchdog, and stacks that py-spy printed.
#
# Only what a text says is repeated, with the rank that it names. Nothing is concluded from it.

MOST_FACTS = 10_000
TIMEOUT = re.compile(
    r"Rank (?P<rank>\d{1,7})\b.{0,200}?Watchdog caught collective operation timeout: WorkNCCL\("
    r"SeqNum=(?P<number>\d{1,19}), OpType=(?P<op>\w{1,40})"
    r"(?:.{0,300}? ran for (?P<ran>\d{1,19}) milliseconds)?"
)
STATUS = re.compile(
    r"Rank (?P<rank>\d{1,7})\b.{0,400}?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,19}), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,19})"
)
THREAD = re.compile(r'^Thread (?:0x)?[\da-fA-F]+ \((?P<state>[^)]{1,40})\)(?:: "(?P<name>[^"]*)")?')
FRAME = re.compile(r"^\s+(?P<name>\S.{0,200}?) \((?P<file>[^()]{1,1000}):(?P<line>\d{1,9})\)")
IN_NAME = re.compile(r"rank[_\-.]?(\d{1,7})|(\d{1,7})(?:\.\w+)*$")


@dataclass
class Facts:
    """What texts state.

    Attributes:
        timeouts: (operation, number in its group) -> {rank: milliseconds}.
        statuses: (last enqueued, last completed) -> ranks.
        stacks: By rank, the stack of its main thread, innermost first.
    """

    timeouts: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    statuses: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return a sentence for each fact that some rank's log states."""
        said = [
            f"NCCL's watchdog: {op} number {number} timed out on {name_ranks(ranks)}"
            + (f" after {max(ranks.values()) / 1e3:g} s" if max(ranks.values()) else "")
            for (op, number), ranks in self.timeouts.items()
        ]
        return said + [
            f"NCCL's watchdog: last enqueued {enqueued}, last completed {completed} on {name_ranks(ranks)}"
            for (enqueued, completed), ranks in self.statuses.items()
        ]


def read_text(data: bytes, name: str, facts: Facts) -> bool:
    """Add what a text states; False if it is no log of NCCL and no output of py-spy."""
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return False
    if any(THREAD.match(line) for line in lines) and any(FRAME.match(line) for line in lines):
        return read_stacks(lines, name, facts)
    found = False
    for line in lines:
        timeout, status = TIMEOUT.search(line[:4000]), STATUS.search(line[:4000])
        if timeout and len(facts.timeouts) < MOST_FACTS:
            key = (timeout["op"], int(timeout["number"]))
            facts.timeouts.setdefault(key, {})[int(timeout["rank"])] = int(timeout["ran"] or 0)
            found = True
        if status and len(facts.statuses) < MOST_FACTS:
            pair = (int(status["enqueued"]), int(status["completed"]))
            facts.statuses.setdefault(pair, set()).add(int(status["rank"]))
            found = True
    return found


def read_stacks(lines: list[str], name: str, facts: Facts) -> bool:
    """Keep the stack of the main thread; the file's name must have the rank."""
    rank = IN_NAME.search(name)
    if rank is None:
        return False
    stacks: dict[str, list[str]] = {}
    thread = ""
    for line in lines:
        header, frame = THREAD.match(line), FRAME.match(line)
        if header:
            thread = header["name"] or f"thread {len(stacks)}"
            stacks.setdefault(thread, [])
        elif frame and thread:
            place = f"{frame['file']}:{frame['line']} in {frame['name']}"
            stacks[thread].append(one_line(place))
    main = stacks.get("MainThread") or next(iter(stacks.values()), [])
    if main:
        facts.stacks[int(rank[1] or rank[2])] = tuple(main)
    return bool(main)


# Read a folder: the dump of each rank, and what logs and stacks beside them state.

MOST_FILES = 100_000
LARGEST = 64 << 20  # bytes of a file; a full buffer of 2,000 calls takes 1 to 5 MB
RANK = re.compile(r"(\d{1,7})(?:\.\w+)?$")


@dataclass
class Evidence:
    """What a folder holds.

    Attributes:
        dumps: The dump of each rank.
        digests: By rank, the BLAKE3 digest of the file.
        broken: By rank, why its dump cannot be read.
        skipped: Files that are neither dumps nor texts that are understood.
        facts: What logs and py-spy state.
    """

    dumps: dict[int, Dump] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)


def collect(folder: Path) -> Evidence:
    """Read every file of a folder and its subfolders.

    Raises:
        ArgumentError: If it is no folder, has no dump, or has two dumps of one rank.
    """
    if not folder.is_dir():
        raise ArgumentError(
            expected="a folder with the flight-recorder dumps of a hang",
            received=f"{folder}, which is no folder",
            remedy="copy the files of all ranks into one folder and name it",
        )
    evidence = Evidence()
    sources: dict[int, tuple[Path, bool]] = {}
    for path in list_files(folder):
        shown = str(path.relative_to(folder))
        try:
            data = read_bytes(path, LARGEST)
        except OSError as error:
            note_broken(evidence, path, shown, f"{error}")
            continue
        start = data[:256].lstrip()[:1]
        if data[:1] != b"\x80" and start != b"{":
            if not read_text(data, path.name, evidence.facts):
                evidence.skipped.append(shown)
            continue
        rank = rank_of(path)
        if rank is None:
            evidence.skipped.append(f"{shown} (its name does not end in a rank)")
            continue
        try:
            dump = read_dump(data, rank)
        except ArgumentError as error:
            note_broken(evidence, path, shown, error.one_line)
            continue
        if keep(evidence, sources, dump, path, data[:1] == b"\x80"):
            evidence.digests[rank] = blake3(data).hexdigest()
    for rank in evidence.dumps:
        evidence.broken.pop(rank, None)
    if not evidence.dumps:
        raise nothing_found(folder, evidence)
    return evidence


def keep(
    evidence: Evidence,
    sources: dict[int, tuple[Path, bool]],
    dump: Dump,
    path: Path,
    pickled: bool,
) -> bool:
    """Add a dump, and return whether it is used: of a pickle and JSON of one rank only the pickle, which has stacks."""
    other, was_pickled = sources.get(dump.rank, (None, False))
    if other is not None and pickled == was_pickled:
        raise ArgumentError(
            expected=f"one dump of rank {dump.rank}",
            received=f"{other.name} and {path.name}, in {other.parent} and {path.parent}",
            remedy="name a folder with the dumps of one hang",
        )
    if other is None or pickled:
        sources[dump.rank] = (path, pickled)
        evidence.dumps[dump.rank] = dump
        return True
    return False


def note_broken(evidence: Evidence, path: Path, shown: str, reason: str) -> None:
    """Note a file that cannot be read, under its rank if its name has one."""
    rank = rank_of(path)
    if rank is None:
        evidence.skipped.append(f"{shown} ({reason})")
    else:
        evidence.broken[rank] = f"{shown}: {reason}"


def nothing_found(folder: Path, evidence: Evidence) -> ArgumentError:
    """Return the error for a folder without a readable dump."""
    files = [*evidence.broken.values(), *evidence.skipped]
    shown = "; ".join(files[:3]) + (f"; and {len(files) - 3} more" if len(files) > 3 else "")
    stated = "; ".join(evidence.facts.lines()[:3])
    return ArgumentError(
        expected="dumps of torch's flight recorder, one file per rank, with the rank at the end of its name",
        received=f"none in {folder}"
        + (f" ({shown})" if shown else "")
        + (f"; logs state: {stated}" if stated else ""),
        remedy="set TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 before the next run; torch writes "
        "/tmp/nccl_trace_rank_N, or what TORCH_FR_DUMP_TEMP_FILE names",
    )


def list_files(folder: Path) -> list[Path]:
    """Return the files below a folder, in order, without following links to folders."""
    found: list[Path] = []
    for root, _, names in os.walk(folder):
        found += [Path(root, name) for name in names]
        if len(found) > MOST_FILES:
            raise ArgumentError(
                expected=f"at most {MOST_FILES:,} files",
                received=f"more in {folder}",
                remedy="copy the dumps of one hang into a folder of their own",
            )
    return sorted(found)


def rank_of(path: Path) -> int | None:
    """Return the number at the end of a file's name."""
    found = RANK.search(path.name)
    return int(found[1]) if found and int(found[1]) < MOST_RANKS else None


@dataclass(frozen=True)
class Place:
    """A call in progress: who is in it, and who is not.

    Attributes:
        differs: Whether the ranks in it do not call the same.
        knows_members: Whether all members of its group are known; if not, others may be missing too.
    """

    call: str
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    states: dict[int, str] = field(default_factory=dict)
    differs: bool = False
    knows_members: bool = True


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
        """The ranks of the job, as far as they are known, that left none that can be read."""
        return tuple(rank for rank in self.history.world if rank not in self.history.dumps)

    @property
    def not_judged(self) -> str:
        """Why dumps that show no hang do not show that there was none; empty if they do, or show a hang."""
        if self.finding is not None:
            return ""
        if self.without_dump:
            one = "the dump of" if len(self.without_dump) == 1 else "dumps of"
            is_are = "is" if len(self.without_dump) == 1 else "are"
            return f"{one} {name_ranks(self.without_dump)} {is_are} missing"
        if not self.history.knows_world:
            return "the dumps do not record how many ranks the job had; state it with --ranks N"
        return ""


def examine(folder: Path, ranks: int | None = None) -> Autopsy:
    """Read the dumps of a folder and find the cause of the hang.

    Args:
        folder: A folder with the files of torch's flight recorder, one per rank.
        ranks: How many ranks the job had, for dumps that do not record it, such as those of gloo.

    Returns:
        The cause, the calls in progress and the last call of each rank.

    Raises:
        ArgumentError: If the folder has no dump that can be read, or one of a rank that `ranks` excludes.

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
    history = History(evidence.dumps, evidence.broken, ranks)
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
        known = history.knows_members(wait.group)
        found.append(
            Place(wait.describe(), tuple(those), tuple(wait.missing()), states, differs, known)
        )
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
