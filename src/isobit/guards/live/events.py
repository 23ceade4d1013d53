"""One record for everything that a guard reports: a metric or a finding.

Does not import torch: logs of a run can be read where torch is not installed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from typing import Any, Protocol

from isobit.foundation.plain_text import one_line

LOGGER = logging.getLogger("isobit.guards")
KINDS = ("metric", "finding")
SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True)
class Event:
    """A metric or a finding of a training run.

    Attributes:
        kind: "metric" or "finding".
        name: The metric, such as "grad.norm", or the rule that a finding breaks, such as "nonfinite-gradient".
        value: The number; None for a finding without one.
        severity: "info", "warning" or "error".
        run: The name of the run.
        step: The optimizer step, from 0; None if it is not known.
        micro_batch: The micro-batch of the step, from 0; None for the whole step.
        rank: The rank that reports.
        module: The module or parameter concerned; empty for the whole model.
        message: A finding in words; empty for a metric.
        time: Seconds since 1970.

    Example:
        >>> from isobit.guards import Event
        >>> print(Event("finding", "nonfinite-gradient", step=3, module="head", message="1 of 8 is not finite"))
        step 3, rank 0: nonfinite-gradient: head: 1 of 8 is not finite
    """

    kind: str
    name: str
    value: float | None = None
    severity: str = "info"
    run: str = ""
    step: int | None = None
    micro_batch: int | None = None
    rank: int = 0
    module: str = ""
    message: str = ""
    time: float = 0.0

    def __str__(self) -> str:
        """Return the event on one line."""
        at = "" if self.step is None else f"step {self.step}, "
        at += "" if self.micro_batch is None else f"micro-batch {self.micro_batch}, "
        parts = [f"{at}rank {self.rank}", self.name, self.module]
        parts.append(self.message or ("" if self.value is None else f"{self.value:.6g}"))
        return one_line(": ".join(part for part in parts if part))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are set, for JSON, where NaN and infinities are strings."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) not in ("", None)
        }
        if self.value is not None and not math.isfinite(self.value):
            fields["value"] = name_of_nonfinite(self.value)
        return fields


def name_of_nonfinite(value: float) -> str:
    """Return "NaN", "Infinity" or "-Infinity": JSON has no numbers for these."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class Sink(Protocol):
    """What receives events. See `isobit.guards.sinks`."""

    def emit(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Write out what is buffered."""
