"""What judging a log returns: limits, findings, the verdict; and what the rules share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 5  # steps of a finding that are written out


@dataclass(frozen=True)
class Limits:
    """What a log is judged by.

    Attributes:
        warmup: Steps that are not judged for a rising loss.
        max_norm: The limit of the gradient norm after clipping.
        norms: "clipped", "unclipped", or "auto": unclipped in a trainer_state.json, as transformers logs them.
        config: The configuration, for the schedule of the learning rate; None is what the log itself has.
    """

    warmup: int = 100
    max_norm: float = 10.0
    norms: str = "auto"
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LogFinding:
    """A rule that a log breaks.

    Attributes:
        rule: The rule.
        severity: "info", "warning" or "error"; info does not count against the run.
        step: The first step concerned.
        message: What was found.
        causes: What usually causes it, the most frequent first; empty if a contract says it.
        claim: The claim of training-stability-v1 whose `if_fails` has the causes.
        steps: Every step concerned, where the finding counts several; the first is `step`.
    """

    rule: str
    severity: str
    step: int
    message: str
    causes: str = ""
    claim: str = ""
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What was found in a log, which rules were judged, and why others were not."""

    findings: tuple[LogFinding, ...]
    judged: tuple[str, ...]
    not_judged: dict[str, str]

    @property
    def is_kept(self) -> bool:
        """Whether nothing was found that counts."""
        return all(finding.severity == "info" for finding in self.findings)


def name_steps(steps: Sequence[int]) -> str:
    """Return how often something was found and at which steps, the first of them; nothing if it was found once."""
    if len(steps) < 2:
        return ""
    more = ", …" if len(steps) > SHOWN else ""
    return f"; {len(steps):,} in all, at steps {', '.join(map(str, steps[:SHOWN]))}{more}"


class NotJudged(Exception):
    """A log that a rule cannot judge, with the reason."""
