"""The result of a run, and the root cause of one that failed."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isobit.errors import IsobitError, RankFailedError, RankLostError, SimulationError
from isobit.foundation.majority import name_ranks
from isobit.simulator.call_sites import is_user_file
from isobit.simulator.checkers.deadlock import deadlock, orphaned_message, orphaned_work
from isobit.simulator.checkers.mismatch import group_mismatches, mismatch, shared_devices
from isobit.simulator.collectives import Operation
from isobit.simulator.faults import Stalled
from isobit.simulator.findings import Killed
from isobit.simulator.run import Run
from isobit.simulator.schedule import Trace, Waiting

# The root cause of a failed run: why no rank can continue, and which rank failed first.


def diagnose(
    run: Run, blocked: Mapping[int, Waiting], stacks: Mapping[int, list[str]]
) -> SimulationError:
    """Find why no rank can continue: they disagree, one of them is gone, or they wait for each other."""
    disputed = group_mismatches(run.group_calls)
    if disputed:
        return disputed[0]
    for waiting in blocked.values():
        if isinstance(waiting, Operation):
            calls = list(waiting.calls.values())
            if len({call.signature() for call in calls}) > 1:
                found = mismatch(waiting, calls)
                found.note = note_of(run, blocked)
                return found
    stalled = [rank for rank, waiting in blocked.items() if isinstance(waiting, Stalled)]
    failed = run.findings.failed
    gone = sorted(failed or stalled)
    if not gone:
        left = {rank.index: "already returned" for rank in run.ranks if rank.left}
        stuck = deadlock(blocked, left, stacks, run.findings.lost)
        stuck.note = note_of(run, blocked)
        return stuck
    waiters = [rank for rank in blocked if rank not in stalled]
    where = ""
    if waiters:
        where = f", and {name_ranks(waiters)} waited in {blocked[waiters[0]].describe()}"
    return RankLostError(
        expected="every rank to reach the calls that other ranks wait in",
        received=f"{name_ranks(gone)} {'failed' if failed else 'stalled'}{where}",
        remedy=f"find out why {name_ranks(gone)} stopped",
        ranks=gone,
        stacks=stacks,
    )


def note_of(run: Run, blocked: Mapping[int, Waiting]) -> str:
    """Return where the ranks came apart before the collectives that they wait in; see `CallSites`."""
    waited = [waiting for waiting in blocked.values() if isinstance(waiting, Operation)]
    notes = (run.network.sites.before(each.group.key, each.number) for each in waited)
    return next(filter(None, notes), "")


def find_origin(error: BaseException | None) -> BaseException | None:
    """Return the simulator's error that the program answered with `error`, or `error` itself."""
    at = error
    while at is not None and not isinstance(at, SimulationError):
        at = at.__cause__ or at.__context__
    return at or error


def first_failure(run: Run) -> SimulationError | None:
    """Return the error of the first rank that failed by itself, or None."""
    if not run.findings.failed:
        return None
    first = run.ranks[run.findings.failed[0]]
    cause = find_origin(first.error)
    if isinstance(cause, SimulationError):
        return cause
    alike = [
        index
        for index in sorted(run.findings.failed)
        if type(run.ranks[index].error) is type(first.error)
    ]
    frames = traceback.extract_tb(cause.__traceback__ if cause else None)
    lines = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in reversed(frames)
        if is_user_file(frame.filename)
    ]
    if isinstance(cause, Killed):
        return RankLostError(
            expected=f"rank {first.index} to run to its end",
            received=f"its crash at call {first.calls}, {cause}",
            remedy="make the other ranks notice it: by a timeout, or a restart from the last checkpoint",
            ranks=alike,
            stacks={first.index: lines},
        )
    own = cause if isinstance(cause, IsobitError) else None  # its fields become those of this error
    error = RankFailedError(
        expected=f"{name_ranks(alike)} to return" + (f", with {own.expected}" if own else ""),
        received=f"{type(cause).__name__}: {own.received if own else cause}",
        remedy=own.remedy if own else "look at its cause; errors of other ranks follow from it",
        ranks=alike,
        stacks={first.index: lines},
    )
    error.__cause__ = cause
    return error


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
