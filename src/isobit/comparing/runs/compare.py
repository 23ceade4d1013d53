"""Read the records of two runs side by side and find the first difference, and the operator that it comes from.

[Note: Where a difference comes from]
Results of operators may differ without any effect, as the tensor in which a script logs the time does. So the first
difference is that of a loss, a gradient, a parameter or the optimizer's state. Until then, memory whose contents differ
carries the operator where that began: an operator whose result differs although nothing that it reads from memory
does is an origin; any other hands on the origin of what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isobit.comparing.runs.report import (
    EMPTY,
    OPERATOR,
    OUTSIDE,
    PATH,
    RANDOM,
    SCALAR,
    SLICE,
    Call,
    Changed,
    Comparison,
    Origin,
)

Event = dict[str, Any]
MOST_HARMLESS = 20


def read_events(path: Path) -> Iterator[Event]:
    """Return the events of a record, one at a time."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):  # a killed run leaves half a line
                yield json.loads(line)


class Walk:
    """Both records, read side by side."""

    def __init__(self, left: Path, right: Path) -> None:
        """Start at the beginning of both."""
        self.streams = read_events(left), read_events(right)
        self.evidence: tuple[Event, Event] = ({}, {})
        self.latest: list[Event] = [{}, {}]
        self.names: dict[int, dict[str, str]] = {}
        self.carried: dict[int, Origin] = {}
        self.origins: list[Origin] = []
        self.path: Origin | None = None  # where the runs began to take different paths
        self.last: Event | None = None
        self.operators = self.tensors = 0
        self.changed: Changed | None = None
        self.origin: Origin | None = None
        self.ends: list[Event] = [{}, {}]
        self.files: list[list[str]] = [[], []]
        self.steps = [0, 0]

    def next_of(self, run: int) -> Event | None:
        """Return the next event to compare; note evidence, names and ends on the way."""
        for event in self.streams[run]:
            kind = event["k"]
            if kind == "evidence":
                self.latest[run] |= event
                self.latest[run].setdefault("rng_at_start", event.get("rng"))
            elif kind == "names":
                self.names.setdefault(event["opt"], event["names"])
            elif kind == "end":
                self.ends[run], self.steps[run] = event, event["step"]
            elif kind == "files":
                self.files[run] = event["paths"]
            elif kind == "state" or self.path is None:
                self.steps[run] = event["step"]
                return event
        return None

    def go(self) -> None:
        """Compare until the first difference of the training's state, or the end."""
        while self.changed is None:
            a, b = self.next_of(0), self.next_of(1)
            if a is None and b is None:
                return
            if a is None or b is None or not is_aligned(a, b):
                if self.path is None:
                    self.take_other_path(a, b)
                    continue
                self.changed = Changed(
                    (a or b or {}).get("step", 0), "steps", "", (shown(a), shown(b))
                )
                self.origin = self.path
            elif a["k"] == "state":
                self.compare_state(a, b)
            else:
                self.compare_call(a, b)

    def take_other_path(self, a: Event | None, b: Event | None) -> None:
        """Note that the runs call different operators from here, and go on to the next state of each."""
        calls = [call_of(event or {"k": "end"}) for event in (a, b)]
        first = min(self.carried.values(), key=lambda o: o.call.number, default=None)
        self.path = first or Origin(calls[0], calls[1], PATH, f"{shown(a)} and {shown(b)}")
        states: list[Event | None] = []
        for run, event in enumerate((a, b)):
            while event is not None and event["k"] != "state":
                event = self.next_of(run)
            states.append(event)
        one, other = states
        if one is not None and other is not None and is_aligned(one, other):
            self.compare_state(one, other)
        elif one is not None or other is not None:
            step = (one or other or {})["step"]
            self.changed = Changed(step, "steps", "", (shown(one), shown(other)))
            self.origin = self.path

    def compare_state(self, a: Event, b: Event) -> None:
        """Compare the digests of losses, gradients, parameters or optimizer state."""
        for i, (one, other) in enumerate(zip(a["d"], b["d"], strict=True)):
            self.tensors += 1
            if one == other:
                continue
            values = [e["values"][i] if "values" in e else "" for e in (a, b)]
            name = self.name_of(a["opt"], a["names"][i])
            self.changed = Changed(a["step"], a["what"], name, (values[0], values[1]))
            self.origin = self.carried.get(a["s"][i]) or self.path
            return

    def name_of(self, optimizer: int, name: str) -> str:
        """Return the name of a tensor of the training's state: a parameter's, and the optimizer's key."""
        index, _, key = name.partition("/")
        shown = self.names.get(optimizer, {}).get(index, index)
        return f"{key} of {shown}" if key else shown

    def compare_call(self, a: Event, b: Event) -> None:
        """Compare one operator, or data from outside that was first seen in a view."""
        if a["k"] == "in":
            if a["x"] != b["x"]:
                origin = outside_origin(self.last or a, self.last or b, a["x"], b["x"])
                self.carried |= {entry[0]: origin for entry in a["x"]}
                self.origins.append(origin)
            return
        self.operators += 1
        self.last = a
        if a["d"] == b["d"]:
            for number in a["out"]:
                self.carried.pop(number, None)
            return
        read = [self.carried[n] for n in a["in"] if n in self.carried]
        if read:
            origin = min(read, key=lambda o: o.call.number)
        else:
            origin = find_origin(a, b)
            self.origins.append(origin)
        self.carried |= dict.fromkeys(a["out"], origin)


def compare_records(left: Path, right: Path) -> Comparison:
    """Compare the records of two runs.

    Args:
        left: The record of the first run.
        right: The record of the second run.

    Returns:
        The first difference, the operator that it comes from, and what was compared.
    """
    walk = Walk(left, right)
    walk.go()
    evidence = walk.latest[0], walk.latest[1]
    for run in (0, 1):  # the ends, for the numbers of steps and the time
        for event in walk.streams[run]:
            if event["k"] == "end":
                walk.ends[run], walk.steps[run] = event, event["step"]
            elif event["k"] == "files":
                walk.files[run] = event["paths"]
    for run in (0, 1):
        evidence[run]["files"] = walk.files[run]
    seconds = sum(end.get("seconds", 0.0) for end in walk.ends)
    spent = sum(end.get("spent", 0.0) for end in walk.ends)
    harmless = [o for o in walk.origins if o != walk.origin]
    return Comparison(
        (walk.steps[0], walk.steps[1]),
        walk.operators,
        walk.tensors,
        walk.changed,
        walk.origin,
        tuple(harmless[:MOST_HARMLESS]),
        evidence,
        spent / seconds if seconds > 0 else None,
    )


def is_aligned(a: Event, b: Event) -> bool:
    """Return whether two events are the same call, or the same part of the training's state."""
    keys = ("k", "what", "opt", "names") if a["k"] == "state" else ("k", "op", "mod", "src", "back")
    return all(a.get(key) == b.get(key) for key in keys)


def call_of(event: Event) -> Call:
    """Return the call of an event; of the end of a run, a call without a name."""
    words = {"state": f"the {event.get('what')}", "end": "the end of the run", "in": "a view"}
    return Call(
        event.get("n", -1),
        event.get("op") or words.get(event["k"], ""),
        event.get("mod", ""),
        event.get("src", ""),
        event.get("back", False),
        event.get("step", 0),
    )


def shown(event: Event | None) -> str:
    """Return what a run does at an event."""
    if event is None:
        return "the end of the run"
    return f"the {event['what']}" if event["k"] == "state" else str(call_of(event))


def find_origin(a: Event, b: Event) -> Origin:
    """Return why an operator's result differs although no memory that it reads carries a difference."""
    calls = call_of(a), call_of(b)
    if a.get("rng") != b.get("rng"):
        return Origin(*calls, RANDOM, "the state of the random number generator differs")
    if a["x"] != b["x"]:
        return outside_origin(a, b, a["x"], b["x"])
    if a["num"] != b["num"]:
        return Origin(*calls, SCALAR, f"{a['num']} and {b['num']}")
    if a.get("parts") != b.get("parts") or a["in"] != b["in"]:
        return Origin(*calls, SLICE, "shape, offset or choice of an input differs")
    return Origin(*calls, OPERATOR, "inputs are equal, bit for bit")


def outside_origin(a: Event, b: Event, left: list[Any], right: list[Any]) -> Origin:
    """Return the origin of a difference that data from outside brings in."""
    calls = call_of(a), call_of(b)
    for one, other in zip(left, right, strict=False):
        if one[1] != other[1]:
            if one[2] == "empty":
                return Origin(*calls, EMPTY, "it reads memory of torch.empty")
            same = bool(one[3]) and one[3] == other[3]
            detail = "the same rows in another order" if same else "an input's values differ"
            return Origin(*calls, OUTSIDE, detail, same)
    return Origin(*calls, OUTSIDE, "another number of inputs is from outside")
