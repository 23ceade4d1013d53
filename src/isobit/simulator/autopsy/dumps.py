"""One dump of torch's flight recorder, checked field by field: the calls of one rank, and its process groups."""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from isobit.errors import ArgumentError
from isobit.simulator.autopsy.closed_pickle import read_pickle

MAJOR = "2"  # of the format; torch 2.4 and later write it
STATES = ("scheduled", "started", "completed")
MOST_RANKS = 1 << 20
DEFAULT_GROUP = "default_pg"  # how torch describes the group of all ranks
RANKS = re.compile(r"\[\s*(\d{1,7}(?:\s*,\s*\d{1,7})*)?\s*,?\s*\]")
MESSAGE = re.compile(r"(?:send (?P<source>-?\d{1,7})->(?P<target>-?\d{1,7}))|"
                     r"(?:recv (?P<receiver>-?\d{1,7})<-(?P<sender>-?\d{1,7}))")  # fmt: skip
# Frames between a program and a collective, on whichever machine the dump was written.
TORCH_FRAMES = re.compile(
    r"(?:site|dist)-packages/torch/|(?:^|/)torch/(?:distributed|_ops|nn|autograd)"
)


@dataclass(eq=False)
class Entry:
    """One call that a rank recorded.

    Attributes:
        record: Its number among all calls of the rank.
        group_id: The number of its group in the process that wrote the dump.
        group: The name of its group.
        desc: The description of the group, such as "default_pg".
        p2p: Whether it is a send, a receive, or the end of a batch of them.
        number: Its number among the collectives, or among the messages, of its group.
        kind: What was called: "all_reduce", "send", "recv", "coalesced".
        peer: Of a message, the other member of the group; -1 is any.
        inputs, outputs: The shapes of the tensors.
        dtypes: Of the inputs and outputs.
        state: "scheduled", "started" or "completed".
        done: Whether it has completed.
        created: When it was called, in nanoseconds of the clock of its host.
        timeout: In milliseconds.
        stack: `file:line in function`, innermost first; without torch's own frames, if others are there.
    """

    record: int
    group_id: int
    group: str
    desc: str
    p2p: bool
    number: int
    kind: str
    peer: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[tuple[str, ...], tuple[str, ...]]
    state: str
    done: bool
    created: int
    timeout: int
    stack: tuple[str, ...]


class Ranks(tuple[int, ...]):
    """World ranks in their order. The hash is remembered, since groups of thousands of ranks are keys of every call."""

    known: int | None = None

    def __hash__(self) -> int:
        if self.known is None:
            self.known = super().__hash__()
        return self.known

    def has(self, rank: int) -> bool:
        """Return whether a rank is one of them."""
        at = bisect_left(self, rank)
        return at < len(self) and self[at] == rank


@dataclass(frozen=True)
class Dump:
    """The dump of one rank.

    Attributes:
        groups: By name, the world ranks of each process group; empty if they were not recorded.
        entries: The calls, in the order in which they were made.
        world: The ranks of the default group; empty if they were not recorded.
        dropped: How many earlier calls the buffer no longer has.
    """

    rank: int
    version: str
    groups: dict[str, Ranks]
    entries: tuple[Entry, ...]
    world: Ranks

    @property
    def dropped(self) -> int:
        """The number of earlier calls that the ring buffer has dropped."""
        return self.entries[0].record if self.entries else 0


def read_dump(data: bytes, rank: int) -> Dump:
    """Read the bytes of a dump: a pickle, or JSON.

    Raises:
        ArgumentError: If they are no dump, or one of a version that is not supported.
    """
    if data[:1] == b"\x80":
        raw = read_pickle(data)
    else:
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise wrong("JSON", type(error).__name__) from None
    raw = typed(raw, dict, "the dump")
    version = typed(raw.get("version"), str, "version")
    if version.split(".")[0] != MAJOR:
        raise ArgumentError(
            expected=f"version {MAJOR}.x of the flight recorder's format",
            received=f"version {version[:40]!r}",
            remedy="record with torch 2.4 or later",
        )
    config = typed(raw.get("pg_config", {}), dict, "pg_config")
    groups = {
        str(name): read_ranks(typed(info, dict, "pg_config").get("ranks", "[]"))
        for name, info in config.items()
    }
    records = typed(raw.get("entries", []), list, "entries")
    entries = [read_entry(typed(record, dict, "an entry")) for record in records]
    entries.sort(key=lambda entry: entry.record)
    default = {name for name, info in config.items() if info.get("desc") == DEFAULT_GROUP}
    default |= {entry.group for entry in entries if entry.desc == DEFAULT_GROUP}
    world = next((groups[name] for name in sorted(default) if groups.get(name)), Ranks())
    return Dump(rank, version, groups, tuple(entries), world)


def read_entry(raw: dict[str, Any]) -> Entry:
    """Check the fields of one call; fields that older versions lack have a default."""
    pair = raw.get("process_group")
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise wrong("process_group: a name and a description", type(pair).__name__)
    group, desc = (typed(part, str, "process_group") for part in pair)
    backend, _, name = typed(raw.get("profiling_name"), str, "profiling_name").partition(":")
    message = MESSAGE.fullmatch(name)
    kind, peer = name.split(" ")[0].lstrip("_"), -1
    if message is not None:
        peer = int(message["target"] or message["sender"])
    p2p = typed(raw.get("is_p2p", message is not None), bool, "is_p2p")
    state = raw.get("state")
    if state not in STATES:
        raise wrong(f"a state out of {', '.join(STATES)}", repr(state)[:40])
    retired = typed(raw.get("retired", False), bool, "retired")
    numbers = {
        key: typed(raw.get(key, 0), int, key)
        for key in ("record_id", "pg_id", "time_created_ns", "timeout_ms")
    }
    number = "p2p_seq_id" if p2p else "collective_seq_id"
    return Entry(
        record=numbers["record_id"],
        group_id=numbers["pg_id"],
        group=group,
        desc=desc,
        p2p=p2p,
        number=typed(raw.get(number), int, number),
        kind=kind,
        peer=peer,
        inputs=read_shapes(raw.get("input_sizes", [])),
        outputs=read_shapes(raw.get("output_sizes", [])),
        dtypes=(read_words(raw.get("input_dtypes", [])), read_words(raw.get("output_dtypes", []))),
        state=state,
        # gloo has no events on a device: it only marks a call as retired.
        done=state == "completed" or (backend == "gloo" and retired),
        created=numbers["time_created_ns"],
        timeout=numbers["timeout_ms"],
        stack=read_frames(raw.get("frames", [])),
    )


def read_ranks(value: Any) -> Ranks:
    """Read `"[0, 1]"`, or a list."""
    if isinstance(value, str):
        return read_ranks_of_text(value)
    return Ranks(sorted({rank_number(rank) for rank in typed(value, list, "ranks")}))


@functools.lru_cache(maxsize=64)
def read_ranks_of_text(text: str) -> Ranks:
    """Read `"[0, 1]"`. The dump of every rank lists all ranks: without the cache, P dumps would have P² numbers."""
    if len(text) > 8 * MOST_RANKS or not RANKS.fullmatch(text):
        raise wrong("ranks such as '[0, 1]'", repr(text[:40]))
    return read_ranks([int(word) for word in re.findall(r"\d+", text)])


def rank_number(value: Any) -> int:
    """Return a rank, or raise."""
    rank: int = typed(value, int, "a rank")
    if not 0 <= rank < MOST_RANKS:
        raise wrong(f"a rank below {MOST_RANKS}", str(rank)[:40])
    return rank


def read_shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """Read a list of shapes."""
    return tuple(
        tuple(typed(size, int, "a size") for size in typed(shape, list, "a shape"))
        for shape in typed(value, list, "sizes")
    )


def read_words(value: Any) -> tuple[str, ...]:
    """Read a list of strings."""
    return tuple(typed(word, str, "a dtype") for word in typed(value, list, "dtypes"))


def read_frames(value: Any) -> tuple[str, ...]:
    """Read a stack; torch's own frames are left out unless there are no others."""
    lines, own = [], []
    for frame in typed(value, list, "frames"):
        fields = typed(frame, dict, "a frame")
        path, name = (typed(fields.get(key, "?"), str, key) for key in ("filename", "name"))
        line = f"{path}:{typed(fields.get('line', 0), int, 'line')} in {name}"
        lines.append(line)
        if not TORCH_FRAMES.search(path):
            own.append(line)
    return tuple(own or lines)


def typed(value: Any, kind: type, what: str) -> Any:
    """Return a value of exactly this type, or raise."""
    if type(value) is not kind:
        raise wrong(f"{what}: {kind.__name__}", type(value).__name__)
    return value


def wrong(expected: str, received: str) -> ArgumentError:
    """Return the error for a file that is no dump."""
    return ArgumentError(
        expected=f"a dump of torch's flight recorder, with {expected}",
        received=received,
        remedy="use a file that torch wrote: TORCH_FR_DUMP_TEMP_FILE names it, and the rank ends its name",
    )
