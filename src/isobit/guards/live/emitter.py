"""`Emitter`: fills in the run, the rank and the time of an event, and hands it to sinks."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from isobit.errors import ArgumentError
from isobit.guards.live.events import KINDS, LOGGER, SEVERITIES, Event, Sink
from isobit.guards.sinks import Logging, Tracker


class Emitter:
    """Hands events to sinks.

    A sink that raises does not stop the training: the error is logged once, `lost` counts the events that the sink did
    not take, and the other sinks still receive them.

    Args:
        sinks: Objects with `emit(event)`, or with `log(dict, step)` or `log_metrics(dict, step)`, such as a run of
            Weights & Biases, an Accelerator or a Lightning logger. None is the `isobit.guards` logger.
        run: The name of the run.
        rank: The rank that reports.

    Raises:
        ArgumentError: If a sink has none of these methods.

    Example:
        >>> from isobit.guards import Emitter
        >>> class Tracker:
        ...     def log(self, values, step):
        ...         print(step, values)
        >>> event = Emitter([Tracker()]).metric("grad.norm", 0.5, step=7)
        7 {'isobit/grad.norm': 0.5}
    """

    def __init__(self, sinks: Iterable[Any] | None = None, *, run: str = "", rank: int = 0) -> None:
        self.sinks: list[Sink] = [as_sink(sink) for sink in ([None] if sinks is None else sinks)]
        self.run, self.rank = run, rank
        self.lost: dict[int, int] = {}  # by the sink's place
        self.lock = threading.RLock()

    def metric(
        self,
        name: str,
        value: float,
        *,
        step: int | None = None,
        micro_batch: int | None = None,
        module: str = "",
    ) -> Event:
        """Emit a number; one that is not finite has severity "error"."""
        severity = "info" if math.isfinite(value) else "error"
        return self.emit(
            Event(
                "metric",
                name,
                float(value),
                severity,
                step=step,
                micro_batch=micro_batch,
                module=module,
            )
        )

    def finding(
        self,
        rule: str,
        message: str,
        *,
        severity: str = "error",
        value: float | None = None,
        step: int | None = None,
        micro_batch: int | None = None,
        module: str = "",
    ) -> Event:
        """Emit a problem: the rule that is broken, and in words what was found."""
        return self.emit(
            Event(
                "finding",
                rule,
                value,
                severity,
                step=step,
                micro_batch=micro_batch,
                module=module,
                message=message,
            )
        )

    def emit(self, event: Event) -> Event:
        """Hand an event to every sink, with the run, the rank and the time filled in; return it."""
        if event.kind not in KINDS or event.severity not in SEVERITIES:
            raise ArgumentError(
                expected=f"a kind of {KINDS} and a severity of {SEVERITIES}",
                received=f"{event.kind!r} and {event.severity!r}",
                remedy="use Emitter.metric or Emitter.finding",
            )
        event = dataclasses.replace(
            event, run=event.run or self.run, rank=event.rank or self.rank, time=time.time()
        )
        with self.lock:
            for at, sink in enumerate(self.sinks):
                self.guarded(at, partial(sink.emit, event))
        return event

    def close(self) -> None:
        """Close every sink, and log how many events one has lost."""
        with self.lock:
            for at, sink in enumerate(self.sinks):
                self.guarded(at, sink.close)
            for at, count in self.lost.items():
                LOGGER.error("%s lost %d events", type(self.sinks[at]).__name__, count)

    def guarded(self, at: int, action: Callable[[], None]) -> None:
        """Run an action of a sink; the first error of a sink is logged with its traceback."""
        try:
            action()
        except Exception:
            if at not in self.lost:
                LOGGER.exception("%s does not take events", type(self.sinks[at]).__name__)
            self.lost[at] = self.lost.get(at, 0) + 1


class EmitOnly:
    """A sink of the user's that has no `close`."""

    def __init__(self, given: Any) -> None:
        self.emit: Callable[[Event], None] = given.emit

    def close(self) -> None:
        """Do nothing."""


def as_sink(given: Any) -> Sink:
    """Return a sink for None, a sink, or an object that logs dictionaries.

    Raises:
        ArgumentError: If it is none of these.
    """
    if given is None:
        return Logging()
    if callable(getattr(given, "emit", None)) and not isinstance(given, logging.Handler):
        return given if callable(getattr(given, "close", None)) else EmitOnly(given)
    if isinstance(given, logging.Logger):
        return Logging(given)
    if callable(getattr(given, "log_metrics", None)) or callable(getattr(given, "log", None)):
        return Tracker(given)
    raise ArgumentError(
        expected="a sink of isobit.guards.sinks, or an object with emit(event), log(dict, step) or "
        "log_metrics(dict, step)",
        received=f"{type(given).__name__}: {given!r}"[:200],
        remedy="pass for example sinks.JsonLines('events.jsonl')",
    )
