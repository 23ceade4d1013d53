"""Read a folder: the dump of each rank, and what logs and stacks beside them state."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from isobit.errors import ArgumentError
from isobit.foundation.files import read_bytes
from isobit.simulator.autopsy.dumps import MOST_RANKS, Dump, read_dump
from isobit.simulator.autopsy.logs import Facts, read_text

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
