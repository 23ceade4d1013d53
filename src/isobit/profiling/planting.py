"""Planted traces: copies of a recording in which one limit of a claim is exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from isobit.profiling import account as causes
from isobit.profiling.bricks import key_of, operator_of, work_of
from isobit.profiling.collectives import match, step_name
from isobit.profiling.records import Claim, Profile
from isobit.profiling.trace import Event, Trace, steps_of
from isobit.profiling.transfers import goes

MARGIN = 1_000_000  # ns beyond a limit
# A host slice of each reason for idle time.
HOST_SLICES = {
    causes.LOADING: ("note", "enumerate(DataLoader)#planted"),
    causes.WAITS: ("call", "cudaStreamSynchronize"),
    causes.ALLOCATING: ("call", "cudaMalloc"),
    causes.COMPILING: ("python", "torch/_dynamo/convert_frame.py: planted"),
    causes.LAUNCHING: ("call", "cudaLaunchKernel"),
    causes.OPERATORS: ("operator", "aten::planted"),
    causes.OPTIMIZER: ("note", "Optimizer.step#Planted.step"),
    causes.PYTHON: ("python", "planted"),
    causes.OVERHEAD: ("overhead", "planted"),
}


def exceed(
    traces: Sequence[Trace],
    profile: Profile,
    claim: Claim,
) -> list[Trace] | None:
    """Return traces in which the one limit of a claim is exceeded; None if that cannot be done."""
    limit: str
    value: Any
    limit, value = next(iter(claim.limits.items()), ("", None))
    if claim.relation == "transfers":
        return with_copies(traces, claim.where["direction"], limit, value)
    if claim.relation == "synchronised":
        return with_unordered(traces, claim.where["direction"])
    if claim.relation == "share":
        return with_share(traces, profile, claim.where["of"], limit, value)
    if claim.relation == "waiting":
        return with_late_rank(traces, profile, value)
    if claim.relation == "count":
        return with_calls(traces, claim, value)
    if not claim.where:  # the time of the step
        each = profile.ranks[0].whole
        need = int(value * 1e6) * len(profile.ranks[0].steps) - each.total
        return lengthened(traces, "idle", max(need, 0) + MARGIN)
    return stretched(traces, profile, claim, limit, value)


def changed(traces: Sequence[Trace], index: int, **lists: list[Event]) -> list[Trace]:
    """Return the traces with other lists of slices in one of them."""
    trace = copy(traces[index])
    for name, events in lists.items():
        setattr(trace, name, events)
    trace.device = sorted(trace.device, key=lambda event: (event.start, event.end))
    return [trace if number == index else one for number, one in enumerate(traces)]


def with_copies(
    traces: Sequence[Trace], direction: str, limit: str, value: Any
) -> list[Trace] | None:
    """Add copies to a step, or make one larger or pageable."""
    for index, trace in enumerate(traces):
        steps = steps_of(trace)
        for event in trace.device:
            if event.kind != "copy" or not goes(event, direction) or not step_name(event, steps):
                continue
            if limit == "per_step":
                more = [copy(event) for _ in range(min(value + 1, 10_000))]
                return changed(traces, index, device=[*trace.device, *more])
            wrong = copy(event)
            if limit == "bytes_per_step":
                wrong.size = value + 1
            else:
                wrong.name = event.name.replace("Pinned", "Pageable")
                if "Pageable" not in wrong.name:
                    wrong.name += " (Pageable -> Device)"
            device = [wrong if one is event else one for one in trace.device]
            return changed(traces, index, device=device)
    return None


def with_unordered(traces: Sequence[Trace], direction: str) -> list[Trace] | None:
    """Add a kernel of another stream that runs while a copy does, launched just before it."""
    for index, trace in enumerate(traces):
        steps = steps_of(trace)
        for event in trace.device:
            if event.kind != "copy" or event.launch is None or not goes(event, direction):
                continue
            if step_name(event, steps):
                kernel = Event(
                    "planted", "kernel", event.start, event.end + 1, (event.device, "planted")
                )
                kernel.device, kernel.launch = event.device, copy(event.launch)
                kernel.launch.start = kernel.launch.end = event.launch.start - 1
                return changed(traces, index, device=[*trace.device, kernel])
    return None


def with_share(
    traces: Sequence[Trace], profile: Profile, cause: str, limit: str, value: float
) -> list[Trace] | None:
    """Lengthen the last step by a cause, or by another one, until its share is beyond the limit."""
    whole = profile.ranks[0].whole
    part = whole.idle if cause == "idle" else whole.parts.get(cause, 0)
    if limit == "at_most":
        if value >= 1:
            return None  # no share is larger
        need = (value * whole.total - part) / (1 - value)
        return lengthened(traces, cause, int(max(need, 0)) + MARGIN)
    if value <= 0:
        return None  # no share is smaller
    other = causes.COMPUTE if cause == "idle" else "idle"
    if cause.startswith("idle: "):
        other = causes.COMPUTE
    return lengthened(traces, other, int(max(part / value - whole.total, 0)) + MARGIN)


def lengthened(traces: Sequence[Trace], cause: str, ns: int) -> list[Trace] | None:
    """Lengthen the last step of the first trace by one cause."""
    trace = traces[0]
    last = steps_of(trace)[-1]
    host = list(trace.host_slices)
    if trace.on_cpu:
        thread = next(
            (e.thread for e in host if e.name == last.name),
            next(e.thread for e in host if e.kind == "operator"),
        )
        note = next((e for e in host if e.name == last.name), None)
        if note is not None:
            longer = copy(note)
            longer.end = last.end + ns
            host = [longer if e is note else e for e in host]
        else:  # the whole trace: work at its end makes it longer
            host.append(
                Event("aten::planted", "operator", last.end + ns, last.end + ns + 1, thread)
            )
        device = list(trace.device)
        if cause == causes.EXPOSED:
            device.append(Event("gloo:planted", "note", last.end, last.end + ns, thread))
        elif cause == causes.COMPUTE:
            host.append(Event("aten::planted", "operator", last.end, last.end + ns, thread))
        elif cause in HOST_SLICES:
            host.append(host_slice(cause, last.end, last.end + ns, thread))
        return changed(traces, 0, host_slices=host, device=device)
    model = trace.device[-1]
    note = next((e for e in host if e.name == last.name), None)
    threads = [e.launch.thread for e in trace.device if e.launch is not None]
    thread = note.thread if note is not None else threads[0] if threads else ("", "")
    end = last.end + ns
    kinds = {
        causes.COMPUTE: ("planted", "kernel"),
        causes.EXPOSED: ("ncclDevKernel_Planted", "kernel"),
        causes.COPIES: ("Memcpy HtoD (Pinned -> Device)", "copy"),
    }
    name, kind = kinds.get(cause, ("planted", "kernel"))
    start = last.end if cause in kinds else end - 1
    event = Event(name, kind, start, end, model.thread)
    event.device = model.device
    event.launch = Event("cudaLaunchKernel", "call", last.start, last.start + 1, thread)
    if cause in HOST_SLICES:
        host.append(host_slice(cause, last.end, end - 1, thread))
        event.launch.end = end - 1  # what waits for its launch is not queued
    return changed(traces, 0, device=[*trace.device, event], host_slices=host)


def host_slice(cause: str, start: int, end: int, thread: Any) -> Event:
    """Return a slice of the host that is one reason for idle time."""
    kind, name = HOST_SLICES[cause]
    event = Event(name, kind, start, end, thread)
    event.loading = cause == causes.LOADING
    return event


def with_late_rank(traces: Sequence[Trace], profile: Profile, value: float) -> list[Trace] | None:
    """Let one rank come late to the last collective that is judged."""
    steps = {trace.rank: steps_of(trace) for trace in traces}
    matched = match(traces, steps, profile.world)
    apart = [one.number for one in profile.collectives if one.apart]
    if matched is None or not apart or value >= 1:
        return None
    meeting = next(m for m in matched.meetings if m.number == apart[-1])
    last = max(meeting.slices, key=lambda rank: matched.start(meeting, rank))
    total = sum(rank.whole.total for rank in profile.ranks)
    others = len(meeting.slices) - 1
    late = int(value * total / max(others - value * len(meeting.slices), 0.5)) * 2 + MARGIN
    found = list(traces)
    for index, trace in enumerate(traces):
        event = meeting.slices.get(trace.rank)
        if event is None:
            continue
        moved = copy(event)
        moved.end += late
        if trace.rank == last:
            moved.start += late
        device = [moved if one is event else one for one in trace.device]
        found = changed(found, index, device=device)
    return found


def with_calls(traces: Sequence[Trace], claim: Claim, value: int) -> list[Trace] | None:
    """Add calls of one kind to the first step."""
    cause = causes.COUNTED[claim.where["of"]]
    trace = traces[0]
    step = steps_of(trace)[0]
    thread = trace.host_slices[0].thread if trace.host_slices else ("", "")
    more = [
        host_slice(cause, step.start + 1, step.start + 2, thread)
        for _ in range(min(value + 1, 10_000))
    ]
    return changed(traces, 0, host_slices=[*trace.host_slices, *more])


def stretched(
    traces: Sequence[Trace],
    profile: Profile,
    claim: Claim,
    limit: str,
    value: float,
) -> list[Trace] | None:
    """Stretch the kernels that a claim is about, until they take too long."""
    rank = profile.ranks[0]
    found = [brick for brick in rank.bricks if claim.means(brick)]
    now = sum(brick.ns for brick in found)
    if not now:
        return None
    if limit == "at_least":
        bound = sum(brick.bound for brick in found)
        if value <= 0:
            return None
        factor = int(bound / value / now) + 2
    else:
        factor = int(value * 1e6 * len(rank.steps) / now) + 2
    trace = traces[0]
    keys = {(b.kind, b.operator, b.shapes, b.dtypes) for b in found}
    longer: dict[int, Event] = {}
    for event in work_of(trace):
        if key_of(event, operator_of(event), False) in keys:
            other = copy(event)
            if event.kind == "operator":
                other.self_time *= factor
            else:
                other.end = event.start + factor * event.duration
            longer[id(event)] = other
    device = [longer.get(id(event), event) for event in trace.device]
    host = [longer.get(id(event), event) for event in trace.host_slices]
    return changed(traces, 0, device=device, host_slices=host)
