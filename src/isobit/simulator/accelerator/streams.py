"""Streams and events of served devices. Calls are carried out in their order, so that nothing has to wait."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from isobit.simulator.rank import current


class ServedEvent:
    """An event: it has happened once it was recorded, at the virtual time of its rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Accept what torch.cuda.Event accepts."""
        self.at: int | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self.at = current().clock

    def wait(self, stream: Any = None) -> None:
        """Do nothing: what was called before has been carried out."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, end: ServedEvent) -> float:
        """Return the virtual milliseconds between two events."""
        if self.at is None or end.at is None:
            raise ValueError("both events must be recorded before the elapsed time is calculated")
        return (end.at - self.at) / 1e3


class ServedStream:
    """A stream: all streams of a rank are one."""

    cuda_stream = stream_id = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        """Accept what torch.cuda.Stream accepts."""
        self.priority = priority

    @property
    def device(self) -> torch.device:
        """The current device of the rank."""
        return torch.device(current().accelerator, current().device)

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def record_event(self, event: ServedEvent | None = None) -> ServedEvent:
        """Record an event."""
        event = ServedEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> ServedStream:
        """Make it current: nothing changes."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave it."""
