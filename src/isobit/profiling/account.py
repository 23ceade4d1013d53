"""Cut a process's time into pieces that each have exactly one cause, so that the parts of any window add up to it.

[Note: One cause for every nanosecond]
Slices overlap: a kernel runs while a collective runs on another stream and the host is in three nested calls. Layers
put the causes in order, and each nanosecond belongs to the first layer that covers it: compute hides communication,
communication hides copies, work of the device hides whatever the host does. What no layer covers is `UNRECORDED`. The
pieces tile the axis by construction, in integer nanoseconds, so the parts of a window add up to its length, and the
parts of adjacent windows to those of both.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise

from isobit.profiling.records import Account
from isobit.profiling.trace import Event, Step, Trace, is_communication

UNRECORDED = "idle: nothing recorded"
Interval = tuple[int, int]


class Timeline:
    """Pieces of time with their causes: piece i is [edges[i], edges[i + 1]) and has cause `causes[i]`."""

    def __init__(self, layers: Sequence[tuple[str, Iterable[Interval]]]) -> None:
        self.names = (*(name for name, _ in layers), UNRECORDED)
        changes: list[tuple[int, int, int]] = []
        for index, (_, intervals) in enumerate(layers):
            for start, end in union(intervals):
                changes += [(start, index, 1), (end, index, -1)]
        changes.sort()
        self.edges: list[int] = []
        self.causes: list[int] = []
        covering = [0] * len(layers)
        for at, index, change in changes:
            covering[index] += change
            cause = next((i for i, count in enumerate(covering) if count), len(layers))
            if self.edges and self.edges[-1] == at:
                self.causes[-1] = cause
            elif not self.causes or self.causes[-1] != cause:
                self.edges.append(at)
                self.causes.append(cause)

    def pieces(self, start: int, end: int) -> Iterable[tuple[int, int, str]]:
        """Yield (start, end, cause) of the pieces of a window, in order; they tile it."""
        index = bisect_right(self.edges, start) - 1
        while start < end:
            cause = self.causes[index] if index >= 0 else len(self.names) - 1
            stop = min(end, self.edges[index + 1]) if index + 1 < len(self.edges) else end
            if stop > start:
                yield start, stop, self.names[cause]
            start, index = stop, index + 1

    def parts(self, start: int, end: int) -> dict[str, int]:
        """Return the nanoseconds of each cause in a window; causes without any are left out."""
        found: dict[str, int] = {}
        for begin, stop, cause in self.pieces(start, end):
            found[cause] = found.get(cause, 0) + stop - begin
        return {name: found[name] for name in self.names if name in found}


def parts_of(
    layers: Sequence[tuple[str, Iterable[Interval]]], start: int, end: int
) -> dict[str, int]:
    """Return the nanoseconds of each cause in one window: the subject of the contract profile-account-v1."""
    return Timeline(layers).parts(start, end)


def tiles(slices: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return (start, end, number) of disjoint tiles that cover what slices (start, end, number) cover.

    Where several slices run at once, the one that started last has the tile: the innermost of nested ones.
    """
    waiting = sorted((start, -end, number) for start, end, number in slices if end > start)
    edges = sorted({start for start, _, _ in waiting} | {-end for _, end, _ in waiting})
    running: list[tuple[int, int, int]] = []  # the one that started last on top, by negated place
    found: list[tuple[int, int, int]] = []
    place = 0
    for start, end in pairwise(edges):
        while place < len(waiting) and waiting[place][0] <= start:
            heappush(running, (-place, -waiting[place][1], waiting[place][2]))
            place += 1
        while running and running[0][1] <= start:
            heappop(running)
        if running:
            found.append((start, end, running[0][2]))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def covered(merged: Sequence[Interval], start: int, end: int) -> int:
    """Return how many nanoseconds of a window merged intervals cover."""
    index, found = max(bisect_right(merged, (start, start)) - 1, 0), 0
    while index < len(merged) and merged[index][0] < end:
        found += max(0, min(merged[index][1], end) - max(merged[index][0], start))
        index += 1
    return found


COMPUTE = "compute"
EARLIER = "work from before the trace"
EXPOSED = "exposed communication"
COPIES = "exposed copies"
LOADING = "idle: data loader"
WAITS = "idle: host waits for the device"
ALLOCATING = "idle: allocator"
COMPILING = "idle: compiling"
LAUNCHING = "idle: host in launch calls"
OPERATORS = "idle: host between launches"
OPTIMIZER = "idle: host in the optimizer"
PYTHON = "idle: host in Python"
QUEUED = "idle: launched, not started"
OVERHEAD = "idle: the profiler's own work"

CAUSES = (
    COMPUTE, EARLIER, EXPOSED, COPIES, LOADING, WAITS, ALLOCATING, COMPILING, LAUNCHING, OPERATORS, OPTIMIZER,
    PYTHON, QUEUED, OVERHEAD, UNRECORDED,
)  # fmt: skip

# What the host does that a budget may count.
COUNTED = {"compilations": COMPILING, "host waits": WAITS, "allocations": ALLOCATING}

SYNC = re.compile(
    r"^(?:cuda|hip)(?:Stream|Device|Event)Synchronize|^(?:cuda|hip)Memcpy(?:WithStream)?$|^cuStreamSynchronize"
)
ALLOC = re.compile(r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostFree|MallocHost|HostMalloc)")
LAUNCH = re.compile(r"Launch|Memcpy|Memset")
COMPILE = re.compile(
    r"torch/_dynamo|convert_frame|CompiledFxGraph|compile_fx|TorchDynamo (?:Compile|entire)|async_compile|"
    r"triton/compiler|ptxas",
    re.I,
)


class Books:
    """The timeline of one trace, and what is needed to account for any window of it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        layers = host_layers(trace) if trace.on_cpu else device_layers(trace)
        self.timeline = Timeline(layers)
        self.communication = union((e.start, e.end) for e in trace.device if e.communicates)
        self.copies = union((e.start, e.end) for e in trace.device if e.kind in ("copy", "set"))

    def account(self, step: Step) -> Account:
        """Account for one step."""
        parts = self.timeline.parts(step.start, step.end)
        communication = covered(self.communication, step.start, step.end)
        copies = covered(self.copies, step.start, step.end)
        return Account(
            rank=self.trace.rank,
            step=step.name,
            start=step.start,
            total=step.end - step.start,
            parts=parts,
            hidden_communication=communication - parts.get(EXPOSED, 0),
            hidden_copies=copies - parts.get(COPIES, 0),
        )


def device_layers(trace: Trace) -> list[tuple[str, Iterator[Interval] | list[Interval]]]:
    """Return the layers of a trace with a device: its work first, then what the host did while it was idle."""
    device, earlier = trace.device, earlier_work(trace)
    busy = union((e.start, e.end) for e in device)
    # Threads that launch work, and the one that has the steps; a loader's workers are other threads.
    threads = {e.launch.thread for e in device if e.launch is not None}
    threads |= {e.thread for e in trace.host_slices if e.name.startswith("ProfilerStep#")}
    host = [e for e in trace.host_slices if not threads or e.thread in threads]
    computes = [e for e in device if e.kind == "kernel" and not e.communicates]
    return [
        (COMPUTE, [(e.start, e.end) for e in computes if e not in earlier]),
        (EXPOSED, [(e.start, e.end) for e in device if e.communicates and e not in earlier]),
        (COPIES, [(e.start, e.end) for e in device if e.kind != "kernel" and e not in earlier]),
        (EARLIER, [(e.start, e.end) for e in earlier]),
        (QUEUED, queued(device, busy)),
        *host_reasons(host),
    ]


def host_layers(trace: Trace) -> list[tuple[str, Iterator[Interval] | list[Interval]]]:
    """Return the layers of a trace without a device: operators are the work; those of a loader are not compute."""
    host = trace.host_slices
    reasons = dict(host_reasons(host))
    work = [e for e in host if e.kind == "operator" and not e.loading]
    return [
        (LOADING, reasons[LOADING]),
        (COMPUTE, [(e.start, e.end) for e in work if not only_starts_a_collective(e)]),
        (EXPOSED, [(e.start, e.end) for e in trace.device]),
        (OVERHEAD, reasons[OVERHEAD]),
        (COMPILING, reasons[COMPILING]),
        (OPTIMIZER, reasons[OPTIMIZER]),
        (PYTHON, reasons[PYTHON]),
    ]


def only_starts_a_collective(event: Event) -> bool:
    """Whether an operator of the host hands a collective to a backend, and computes nothing."""
    return event.name.startswith(("c10d::", "c10d_functional::", "_c10d_functional::")) or (
        event.name == "record_param_comms"
    )


def host_reasons(host: list[Event]) -> list[tuple[str, list[Interval]]]:
    """Return what the host did, the most specific reason first."""
    found: dict[str, list[Interval]] = {
        name: []
        for name in (
            OVERHEAD, COMPILING, ALLOCATING, LOADING, WAITS, OPTIMIZER, LAUNCHING, OPERATORS, PYTHON,
        )
    }  # fmt: skip
    for event in host:
        for name in reasons_of(event.kind, event.name, event.loading):
            found[name].append((event.start, event.end))
    return list(found.items())


@lru_cache(maxsize=1 << 16)  # a trace has few names
def reasons_of(kind: str, name: str, loading: bool) -> tuple[str, ...]:
    """Return the layers that a host slice belongs to."""
    if kind == "overhead":
        return (OVERHEAD,)
    if kind == "call":
        for pattern, reason in ((ALLOC, ALLOCATING), (SYNC, WAITS), (LAUNCH, LAUNCHING)):
            if pattern.search(name):
                return (reason,)
        return ()
    if name.startswith(("ProfilerStep#", "isobit: ")) or is_communication(kind, name):
        return ()
    found = [COMPILING] if COMPILE.search(name) else []
    if kind == "note" and loading:
        found.append(LOADING)
    elif kind == "note" and name.startswith("Optimizer.step"):
        found.append(OPTIMIZER)
    return (*found, OPERATORS if kind == "operator" else PYTHON)


def earlier_work(trace: Trace) -> set[Event]:
    """Return device slices that were launched before the recording began.

    Their launches are missing, and they come before the first slice whose launch was recorded. Kernels of a graph may
    have no launch either, but come later, or in a trace without any launch.
    """
    first = next((e.start for e in trace.device if e.launch is not None), None)
    if first is None:
        return set()
    return {e for e in trace.device if e.launch is None and e.start < first}


def queued(device: list[Event], busy: list[Interval]) -> list[Interval]:
    """Return the gaps in which the next slice had been launched: it waited for the device, not for the host."""
    gaps = []
    starts = [start for start, _ in busy]
    for event in device:
        if event.launch is None:
            continue
        index = bisect_right(starts, event.start) - 1
        if index >= 0 and starts[index] == event.start:
            begin = max(busy[index - 1][1], event.launch.end) if index else event.launch.end
            if begin < event.start:
                gaps.append((begin, event.start))
    return gaps
