"""Find what a run left in its folder: traces, logs, dumps of a hang, configurations, checkpoints. Loads no torch."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isobit.errors import ArgumentError

DEEPEST, MOST_FILES = 4, 5_000
HEAD = 1 << 16  # bytes of a file that tell what it is
CONFIGURATIONS = (".yaml", ".yml", ".toml")
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp")
CONFIG_NAMES = ("config", "cfg", "train", "args", "recipe")
TEXTS = (".log", ".txt", ".err", ".out")


@dataclass(frozen=True)
class RunFiles:
    """The files of a run by what they are; `skipped` counts the others."""

    folder: Path
    traces: tuple[Path, ...] = ()
    events: tuple[Path, ...] = ()  # of isobit.guards.watch
    logs: tuple[Path, ...] = ()
    dumps: tuple[Path, ...] = ()  # folders with dumps of torch's flight recorder
    configurations: tuple[Path, ...] = ()
    texts: tuple[Path, ...] = ()  # what the run printed
    checkpoints: tuple[Path, ...] = ()
    skipped: int = 0


def look_into(folder: Path) -> RunFiles:
    """Say what each file of a folder is, by its first bytes.

    Raises:
        ArgumentError: If it is no folder, or has nothing that can be read.
    """
    if not folder.is_dir():
        raise ArgumentError(
            expected="the folder of a run",
            received=f"{folder}, which is no folder",
            remedy="name the folder that has the run's traces, logs or dumps",
        )
    found: dict[str, list[Path]] = {}
    skipped = 0
    for path in files_of(folder):
        kind = kind_of(path)
        if kind:
            found.setdefault(kind, []).append(path)
        else:
            skipped += 1
    if not found:
        raise ArgumentError(
            expected="traces, logs, events of isobit.guards.watch, dumps of a hang or a configuration",
            received=f"{folder} with {skipped} other files",
            remedy="record the run: isobit.guards.watch(..., sinks=[sinks.JsonLines('events.jsonl')]), torch.profiler, "
            "or TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 for a hang; or keep stderr in a file stderr.log",
        )
    dumps = sorted({path.parent for path in found.get("dump", ())})
    return RunFiles(
        folder,
        traces=tuple(found.get("trace", ())),
        events=tuple(found.get("events", ())),
        logs=tuple(found.get("log", ())),
        dumps=tuple(dumps),
        configurations=tuple(found.get("configuration", ())),
        texts=tuple(found.get("text", ())),
        checkpoints=tuple(found.get("checkpoint", ())),
        skipped=skipped,
    )


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder in the order of their names; links are not followed."""
    number = 0
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(f for f in folders if not f.startswith(".")) if depth < DEEPEST else []
        for name in sorted(names):
            path = Path(place) / name
            if path.is_symlink() or not path.is_file():
                continue
            number += 1
            if number > MOST_FILES:
                raise ArgumentError(
                    expected=f"at most {MOST_FILES:,} files",
                    received=f"{folder} with more",
                    remedy="name a folder with the files of one run",
                )
            yield path


def kind_of(path: Path) -> str:
    """Return trace, events, log, dump, configuration, text, checkpoint or nothing."""
    name = path.name.lower()
    if name.endswith(WEIGHTS) and "trace" not in name and "dump" not in name:
        return "checkpoint"
    if name.startswith("events.out.tfevents"):
        return "log"
    if path.suffix in CONFIGURATIONS:
        return "configuration"
    head = head_of(path)
    if b'"traceEvents"' in head or (b'"schemaVersion"' in head and b'"deviceProperties"' in head):
        return "trace"
    if b'"pg_config"' in head or (
        head[:1] == b"\x80" and (b"pg_config" in head or b"entries" in head)
    ):
        return "dump"
    if path.suffix == ".csv" or name == "trainer_state.json":
        return "log"
    kind = ""
    if name.endswith((".jsonl", ".json", ".ndjson", ".log")):
        kind = kind_of_lines(name, head)
    is_text = name.endswith(TEXTS) or name.startswith(("stdout", "stderr"))
    return kind or ("text" if is_text and b"\0" not in head else "")


def kind_of_lines(name: str, head: bytes) -> str:
    """Tell events of `watch`, a log and a configuration in JSON apart by the first object."""
    first = next(
        (line for line in head.decode("utf-8", "replace").splitlines() if line.strip()), ""
    )
    try:
        entry = json.loads(first)
    except (ValueError, RecursionError):
        entry = None
    if isinstance(entry, dict):
        if entry.get("kind") in ("metric", "finding") and "name" in entry:
            return "events"
        if any(key in entry for key in ("loss", "step", "train_loss", "train/loss")):
            return "log"
    if name.endswith(".json") and any(word in name for word in CONFIG_NAMES):
        return "configuration"
    return ""


def head_of(path: Path) -> bytes:
    """Read the first bytes of a file, unpacked if it is gzipped."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
        if head[:2] == b"\x1f\x8b":
            with gzip.open(path) as unpacked:
                head = unpacked.read(HEAD)
    except (OSError, EOFError):
        return b""
    return head
