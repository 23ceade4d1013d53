"""Copies of a trace: by direction and step, and those that nothing orders after a kernel of another stream."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

from isobit.profiling.collectives import step_name
from isobit.profiling.trace import Event, Trace, steps_of

ORDERING = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "StreamWaitEvent")


def goes(event: Event, direction: str) -> bool:
    """Whether a copy goes in a direction, such as HtoD."""
    return direction in event.name


def copies_by_step(trace: Trace, direction: str) -> dict[str, list[Event]]:
    """Return the copies in a direction, such as HtoD, that each step launched; a step may have none."""
    steps = steps_of(trace)
    found: dict[str, list[Event]] = {step.name: [] for step in steps}
    for event in trace.device:
        if event.kind == "copy" and goes(event, direction):
            name = step_name(event, steps)
            if name:
                found[name].append(event)
    return found


def unordered(trace: Trace, direction: str) -> Iterator[tuple[Event, Event]]:
    """Yield copies, each with a kernel of another stream that was launched before and after which nothing waited."""
    waits = sorted(
        event.start
        for event in trace.host_slices
        if event.kind == "call" and any(word in event.name for word in ORDERING)
    )
    streams: dict[Any, list[Event]] = {}
    for event in trace.device:
        if event.kind == "kernel" and event.launch is not None and not event.communicates:
            streams.setdefault(event.thread, []).append(event)
    launched = {}
    for stream, kernels in streams.items():
        kernels.sort(key=lambda event: event.launch.start if event.launch else 0)
        launched[stream] = [event.launch.start for event in kernels if event.launch]
    steps = steps_of(trace)
    for event in trace.device:
        if event.kind != "copy" or event.launch is None or not goes(event, direction):
            continue
        if not step_name(event, steps):
            continue
        for stream, kernels in streams.items():
            index = bisect_left(launched[stream], event.launch.start) - 1
            if stream == event.thread or index < 0:
                continue
            last = kernels[index]
            assert last.launch is not None
            between = bisect_left(waits, event.launch.start) - bisect_right(
                waits, last.launch.start
            )
            if between <= 0:
                yield event, last
                break
