"""One process's trace: device slices linked to the calls that launched them, and host slices nested by thread.

[Note: What a trace has]
torch.profiler writes complete events ("ph": "X") in categories. `kernel`, `gpu_memcpy`, `gpu_memset` ran on a device;
`cuda_runtime` and `cuda_driver` (also on ROCm) are the calls that launched them, joined by `correlation`; `cpu_op`,
`user_annotation` and `python_function` are nested intervals of a thread around those calls. torch before 1.12 writes
`Kernel`, `Memcpy`, `Memset`, `Runtime` and `Operator`, the last also for annotations. A trace of a CPU has no device:
there the operators themselves are the work, and collectives are annotations such as `gloo:all_reduce`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import blake3

from isobit.profiling.records import CoreTime
from isobit.profiling.trace_files import JsonStream, Source, find_sources, nanoseconds, refuse

MOST_EVENTS = 20_000_000  # that are kept; about 10 GB
LONGEST_NAME = 2000
DEEPEST_PATH = 64  # modules
MOST_RANKS = 1 << 20
LARGEST_COPY = 1 << 50  # bytes

DEVICE = {
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "copy",
    "Memcpy": "copy",
    "gpu_memset": "set",
    "Memset": "set",
}
HOST = {
    "cpu_op": "operator",
    "Operator": "operator",
    "user_annotation": "note",
    "python_function": "python",
    "cuda_runtime": "call",
    "Runtime": "call",
    "cuda_driver": "call",
    "hip_runtime": "call",
    "overhead": "overhead",
}
COMMUNICATION = re.compile(
    r"nccl|rccl|all_?reduce_?kernel|cross_device_reduce|deep_ep|internode::|intranode::|nvshmem|"
    r"symm_mem|multimem_all|one_shot_all_reduce|two_shot_all_reduce",
    re.I,
)
HOST_COLLECTIVE = re.compile(r"(?:gloo|mpi|ucc|xccl):")
NOTE_NAMES = ("ProfilerStep#", "enumerate(DataLoader)", "Optimizer.")
LOADER = re.compile(r"DataLoader")
MODULE = "nn.Module: "
RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_.]?(\d{1,6})", re.I)


class Event:
    """One slice of a trace, in nanoseconds.

    Attributes:
        kind: "kernel", "copy", "set" of a device; "operator", "note", "python", "call", "overhead" of the host.
        thread: Process and thread of the host, or the stream of the device.
        parent: Of the host: the innermost slice of the same thread that contains this one.
        launch: Of the device: the call that launched it, or None if that was not recorded.
        shaped: Of the host: the innermost operator with shapes that is, or contains, this slice.
        outer, operator: Of the host: the outermost and the innermost operator that is, or contains, this slice.
        module: Of the host: the name of the innermost module or annotation around this slice.
        loading: Of the host: whether it is inside a data loader.
        self_time: Of the host: nanoseconds that no operator inside it covers.
        path: Of the host: the modules around this slice, outermost first; of a backward, those of its forward.
        is_backward: Of the host: whether it is inside a function of autograd's engine.
        dims, types, strides, concrete: Of an operator with shapes.
        size: Bytes of a copy.
        message: Of a collective: name, elements, dtype and group, where recorded.
    """

    __slots__ = (
        "concrete", "correlation", "device", "dims", "end", "is_backward", "kind", "launch", "loading",
        "message", "module", "name", "operator", "outer", "parent", "path", "self_time", "sequence",
        "shaped", "size", "start", "strides", "thread", "types",
    )  # fmt: skip

    def __init__(self, name: str, kind: str, start: int, end: int, thread: tuple[Any, Any]) -> None:
        self.name, self.kind, self.start, self.end, self.thread = name, kind, start, end, thread
        self.parent: Event | None = None
        self.launch: Event | None = None
        self.shaped: Event | None = None
        self.outer: Event | None = None
        self.operator: Event | None = None
        self.module, self.loading, self.self_time = "", False, 0
        self.correlation: int | None = None
        self.device: Any = None
        self.dims: list[Any] | None = None
        self.types: list[Any] = []
        self.strides: list[Any] = []
        self.concrete: list[Any] = []
        self.path: tuple[str, ...] = ()
        self.sequence: int | None = None
        self.is_backward = False
        self.size = 0
        self.message: dict[str, Any] | None = None

    @property
    def duration(self) -> int:
        """The length in nanoseconds."""
        return self.end - self.start

    @property
    def communicates(self) -> bool:
        """Whether it is a collective or a message between devices."""
        return is_communication(self.kind, self.name)


@lru_cache(maxsize=1 << 16)  # a trace has few names
def is_communication(kind: str, name: str) -> bool:
    """Whether a slice of this kind and name is a collective or a message between devices."""
    if kind == "note":
        return bool(HOST_COLLECTIVE.match(name))
    return kind == "kernel" and bool(COMMUNICATION.search(name))


class Trace:
    """The trace of one process.

    Attributes:
        name: The name of its file.
        digest: BLAKE3 of its JSON.
        rank, world: Its rank and the number of ranks; world is 0 if the trace does not say.
        base: Nanoseconds to add to its times to get those of other ranks' clocks.
        gpu: The name of the device, if recorded.
        on_cpu: Whether it has no device: operators are the work.
        device: Device slices by start; on a CPU, collectives only.
        host_slices: Host slices by thread, then by start.
        notes: What was left out, in words.
    """

    def __init__(self, name: str) -> None:
        self.name, self.digest, self.gpu = name, "", ""
        self.rank, self.world, self.on_cpu = 0, 0, False
        self.base = 0
        self.device: list[Event] = []
        self.host_slices: list[Event] = []
        self.notes: list[str] = []

    @property
    def collectives(self) -> list[Event]:
        """The collectives and messages, by start."""
        return [event for event in self.device if event.communicates]


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """Read all traces of files, archives and folders."""
    return [read_trace(source) for path in paths for source in find_sources(path)]


def read_trace(source: Source) -> Trace:
    """Read one trace.

    Raises:
        ArgumentError: If it is no trace, is damaged, or has neither work of a device nor operators.
    """
    digest = blake3.blake3()
    stream = JsonStream(hashed(source.chunks, digest), source.name)
    trace = Trace(source.name)
    header: dict[str, Any] = {}
    builder = Builder(trace)
    number = 0
    for key, value in stream.entries():
        if key:
            header[key] = value
            continue
        number += 1
        if isinstance(value, dict):
            builder.add(value, number)
        else:
            raise refuse(trace.name, "events that are objects", f"event {number} is no object")
    trace.digest = digest.hexdigest()
    read_header(trace, header)
    builder.finish()
    return trace


def hashed(chunks: Iterator[bytes], digest: Any) -> Iterator[bytes]:
    """Yield chunks and add them to a digest."""
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def read_header(trace: Trace, header: dict[str, Any]) -> None:
    """Read rank, world, host and GPU; the file's name gives the rank where the trace does not."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = info.get("rank"), info.get("world_size")
    named = RANK_IN_NAME.search(trace.name.rpartition(":")[2])
    if type(rank) is not int and named:
        rank = int(named[1])
    if type(rank) is int and 0 <= rank < MOST_RANKS:
        trace.rank = rank
    trace.world = world if type(world) is int and 0 < world <= MOST_RANKS else 0
    base = header.get("baseTimeNanoseconds")
    trace.base = base if type(base) is int and abs(base) < 1 << 63 else 0
    devices = header.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        trace.gpu = str(devices[0].get("name", ""))[:200]


class Builder:
    """Collects the events of one trace, then links and nests them."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.device: list[Event] = []
        self.host: list[Event] = []
        self.calls: dict[int, Event] = {}
        self.dropped: Counter[str] = Counter()

    def add(self, raw: dict[str, Any], number: int) -> None:
        """Keep an event that has a duration and a known category."""
        if raw.get("ph") != "X":
            return
        category = raw.get("cat")
        if not isinstance(category, str):
            return
        kind = DEVICE.get(category) or HOST.get(category)
        if kind is None:
            return
        name = raw.get("name")
        name = name[:LONGEST_NAME] if isinstance(name, str) else ""
        start, length = nanoseconds(raw.get("ts")), nanoseconds(raw.get("dur", 0))
        on_device = category in DEVICE
        if start is None or length is None or length < 0:
            received = f"event {number}, {name[:60]!r}, with ts {raw.get('ts')!r:.40} and dur {raw.get('dur')!r:.40}"
            if on_device or name.startswith("ProfilerStep#"):
                raise refuse(self.trace.name, "times that are finite and not negative", received)
            self.dropped["times that are not finite or negative"] += 1
            return
        if len(self.device) + len(self.host) >= MOST_EVENTS:
            raise refuse(
                self.trace.name,
                f"at most {MOST_EVENTS:,} slices",
                "more",
                "profile fewer steps: schedule(active=2)",
            )
        args = raw.get("args")
        args = args if isinstance(args, dict) else {}
        thread = (plain_id(raw.get("pid")), plain_id(raw.get("tid")))
        event = Event(name, kind, start, start + length, thread)
        correlation = args.get("correlation")
        if type(correlation) is int:
            event.correlation = correlation
        if on_device:
            self.add_device(event, args)
        else:
            self.add_host(event, args)

    def add_device(self, event: Event, args: dict[str, Any]) -> None:
        """Keep a slice of the device."""
        event.thread = (
            plain_id(args.get("device", event.thread[0])),
            plain_id(args.get("stream", event.thread[1])),
        )
        event.device = event.thread[0]
        size = args.get("bytes")
        event.size = size if type(size) is int and 0 <= size < LARGEST_COPY else 0
        if "Collective name" in args:
            event.message = args
        self.device.append(event)

    def add_host(self, event: Event, args: dict[str, Any]) -> None:
        """Keep a slice of the host."""
        if event.kind == "operator":
            if event.name.startswith(NOTE_NAMES):
                event.kind = "note"  # torch before 1.12 has one category for both
            if "Collective name" in args:
                event.message = args
        if event.kind in ("operator", "note"):
            dims, types = args.get("Input Dims"), args.get("Input type")
            if isinstance(dims, list) and isinstance(types, list) and any(dims):
                event.dims, event.types = dims, types
                strides = args.get("Input Strides")
                event.strides = strides if isinstance(strides, list) else []
                concrete = args.get("Concrete Inputs")
                event.concrete = concrete if isinstance(concrete, list) else []
            sequence = args.get("Sequence number")
            if type(sequence) is int and sequence >= 0:
                event.sequence = sequence
        elif event.kind == "call" and event.correlation is not None:
            self.calls[event.correlation] = event
        self.host.append(event)

    def finish(self) -> None:
        """Nest the host's slices, link the device's, and choose what the work is."""
        trace = self.trace
        trace.host_slices = nest(self.host)
        self.device.sort(key=lambda event: (event.start, event.end))
        for event in self.device:
            if event.correlation is not None:
                event.launch = self.calls.get(event.correlation)
            if event.message is None and event.launch is not None and event.communicates:
                event.message = message_above(event.launch)
        trace.device = self.one_device()
        if not trace.device:
            trace.on_cpu = True
            trace.device = sorted(
                (event for event in trace.host_slices if event.communicates),
                key=lambda event: (event.start, event.end),
            )
            if not any(event.kind == "operator" for event in trace.host_slices):
                raise refuse(
                    trace.name,
                    "a trace with kernels, copies or operators",
                    f"{len(self.host)} slices, none of them work",
                    "record with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], "
                    "record_shapes=True)",
                )
        for reason, count in self.dropped.items():
            trace.notes.append(f"{count:,} host events are left out: {reason}")

    def one_device(self) -> list[Event]:
        """Return the slices of the device that works most; a note says how much the others have."""
        work: Counter[Any] = Counter()
        for event in self.device:
            work[event.device] += event.duration
        if len(work) < 2:
            return self.device
        (busiest, most), total = work.most_common(1)[0], sum(work.values())
        self.trace.notes.append(
            f"kernels of {len(work)} devices in one process: the accounts are of device {busiest}, which has "
            f"{most / max(total, 1):.0%} of the device time"
        )
        return [event for event in self.device if event.device == busiest]


def plain_id(value: Any) -> Any:
    """Return the id of a process, thread or stream: a number or a text; anything else, also none, is one thread."""
    return value if isinstance(value, (int, str)) else ""


def nest(host: list[Event]) -> list[Event]:
    """Give each host slice its parent and what it inherits; the slices by thread and start.

    Slices that cross (functions of Python that were open when the recording began) do not nest: the parent is the
    innermost slice that contains the whole of this one. A slice that ends before this one ends cannot contain anything
    that starts later and is not inside this one, so it leaves the stack, and the work is linear.
    """
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in host:
        threads[event.thread].append(event)
    ordered = []
    forwards: dict[int, tuple[str, ...]] = {}
    # A backward is in another thread than its forward, or later in the same one.
    for slices in sorted(threads.values(), key=lambda found: min(event.start for event in found)):
        slices.sort(key=lambda event: (event.start, -event.end))
        stack: list[Event] = []
        for event in slices:
            while stack and (stack[-1].end <= event.start or stack[-1].end < event.end):
                stack.pop()
            inherit(event, stack[-1] if stack else None, forwards)
            stack.append(event)
        ordered += slices
    return ordered


def inherit(event: Event, parent: Event | None, forwards: dict[int, tuple[str, ...]]) -> None:
    """Set what a host slice has from its parent; `forwards` has the modules of each forward by sequence number."""
    event.parent = parent
    if parent is not None:
        event.shaped, event.outer, event.operator = parent.shaped, parent.outer, parent.operator
        event.module, event.loading = parent.module, parent.loading
        event.path, event.is_backward = parent.path, parent.is_backward
    if event.kind == "operator":
        event.self_time = event.duration
        if event.operator is not None:
            event.operator.self_time -= event.duration
        event.operator, event.outer = event, event.outer or event
        if event.dims is not None and not event.name.startswith("autograd::"):
            event.shaped = event
        if event.name.startswith("autograd::engine"):
            event.is_backward = True
            if event.sequence is not None:
                event.path = forwards.get(event.sequence, event.path)
            event.module = event.module or "backward"
        elif event.sequence is not None and not event.is_backward and event.path:
            forwards[event.sequence] = event.path
    elif event.kind == "python" and event.name.startswith(MODULE):
        event.module = event.name[len(MODULE) :]
        if len(event.path) < DEEPEST_PATH:
            event.path = (*event.path, event.module)
    elif event.kind == "note":
        if LOADER.search(event.name):
            event.loading = True
        elif not event.name.startswith(("ProfilerStep#", "nccl:", "gloo:")):
            event.module = event.name.strip("# ")


def message_above(launch: Event) -> dict[str, Any] | None:
    """Return what the operator `record_param_comms` around a launch says of a collective."""
    event: Event | None = launch
    for _ in range(8):  # it is directly above the call
        if event is None:
            return None
        if event.message is not None:
            return event.message
        event = event.parent
    return None


# The steps of a trace: annotations of torch.profiler's schedule, or the whole trace.

STEP = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(frozen=True)
class Step:
    """One step: its name, and its window in nanoseconds."""

    name: str
    start: int
    end: int


def steps_of(trace: Trace) -> tuple[Step, ...]:
    """Return the steps of a trace, by start.

    A step begins with its annotation and ends where the next one begins, if that is the next number, so the steps of a
    recording tile it. The last one ends with the device work that it launched, which ends after the annotation.
    """
    notes = [e for e in trace.host_slices if e.kind == "note" and STEP.fullmatch(e.name)]
    notes.sort(key=lambda event: (event.start, event.end))
    if not notes:
        work = trace.device + [e for e in trace.host_slices if e.kind in ("operator", "call")]
        return (Step("whole trace", min(e.start for e in work), max(e.end for e in work)),)
    ends = ends_of_work(trace, notes)
    steps = []
    for note, following, end in zip(notes, [*notes[1:], None], ends, strict=True):
        if following is not None:
            is_next = number_of(following) == number_of(note) + 1
            end = following.start if is_next else min(end, following.start)
        if end > note.start:
            steps.append(Step(note.name, note.start, end))
    if not steps:
        raise refuse(trace.name, "steps that take time", f"{len(notes)} empty steps")
    return tuple(steps)


CORE_TIMES = re.compile(
    r"isobit: core times in ns: ran (\d{1,18}), waited (\d{1,18}), senders_ran (\d{1,18}), "
    r"senders_waited (\d{1,18}), stolen (\d{1,18})"
)


def core_times_of(trace: Trace, steps: Iterable[Step]) -> dict[str, CoreTime]:
    """Return what the machine took from the process in each step, where the recording says so."""
    found = {}
    marks = sorted(
        (event.start, *map(int, match.groups()))
        for event in trace.host_slices
        if event.kind == "note" and (match := CORE_TIMES.fullmatch(event.name))
    )
    for step in steps:
        index = bisect_right(marks, step.end, key=lambda mark: mark[0]) - 1
        if index >= 0 and marks[index][0] >= step.start:
            found[step.name] = CoreTime(step.end - step.start, *marks[index][1:])
    return found


def number_of(note: Event) -> int:
    """Return the number in the name of a step."""
    found = STEP.fullmatch(note.name)
    assert found is not None
    return int(found[1])


def ends_of_work(trace: Trace, notes: list[Event]) -> list[int]:
    """Return when each annotation and the device work that was launched during it end."""
    starts, ends = [note.start for note in notes], [note.end for note in notes]
    for event in trace.device:
        if event.launch is not None:
            index = bisect_right(starts, event.launch.start) - 1
            if index >= 0 and event.launch.start < notes[index].end:
                ends[index] = max(ends[index], event.end)
    return ends
