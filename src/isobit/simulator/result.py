"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from isobit.errors import SimulationError
from isobit.simulator.checkers.devices import shared_devices
from isobit.simulator.checkers.mismatch import group_mismatches
from isobit.simulator.checkers.orphans import orphaned_message, orphaned_work
from isobit.simulator.root_cause import first_failure
from isobit.simulator.run import Run
from isobit.simulator.trace import Trace


@dataclass
class Result:
    """The result of a run.

    Attributes:
        values: What the function returned on each rank.
        trace: The events of the run.
        findings: What the checkers found.
        clocks: The virtual time of each rank at its end, in microseconds.
        calls: The number of communication calls of all ranks.
        not_judged: Checks of training that could not be made, by name, with the reason; empty if training was not
            watched.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.simulator import World
        >>> result = World(2).run(lambda rank: dist.get_world_size() + rank)
        >>> result.values, result.findings
        ([2, 3], [])
    """

    values: list[Any]
    trace: Trace
    findings: list[SimulationError] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    calls: int = 0
    not_judged: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The digest of the trace: equal for equal schedules."""
        return self.trace.digest


def conclude(run: Run) -> Result:
    """Return the result of a run that has ended.

    Raises:
        SimulationError: The root cause, if a rank failed or the run was stopped; in a strict run also the first
            finding. The result is its attribute `result`.
    """
    run.recorder.finish()
    found = run.findings.found
    calls = sum(rank.calls for rank in run.ranks)
    values = [rank.value for rank in run.ranks]
    result = Result(values, run.recorder.trace, found, run.schedule.clocks, calls)
    error = first_failure(run) or run.findings.root
    if error is None:
        if run.training is not None:
            run.training.finish()
        found.extend(group_mismatches(run.group_calls))
        found.extend(shared_devices(run.ranks))
        found.extend(orphaned_work(run.ranks))
        found.extend(map(orphaned_message, run.network.unreceived()))
        error = run.recorder.departure
    elif found and error.kind not in {each.kind for each in found}:
        error.follows = found[0].kind
    if run.training is not None:
        result.not_judged = run.training.not_judged()
    if found and run.findings.strict and error is not found[0]:
        found[0].__cause__ = error  # wrong data was seen before its consequences
        if error is not None and error.kind not in {each.kind for each in found}:
            found.append(error)
        error = found[0]
    if error is not None:
        error.result = result
        raise error
    return result
