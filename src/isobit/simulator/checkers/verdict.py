"""How a run is judged: what stopped it, which failure came first, and what it left behind."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobit.errors import IsobitError, RankFailedError, RankLostError, SimulationError
from isobit.simulator.checkers import collective_calls
from isobit.simulator.network import Operation
from isobit.simulator.rank import is_users
from isobit.simulator.schedule import Waiting
from isobit.simulator.trace import Trace

if TYPE_CHECKING:
    from isobit.simulator.world import World


class Killed(BaseException):
    """Ends a rank's thread; no `except Exception` of a program stops it."""


class Stalled:
    """A rank that a fault stopped for good."""

    def describe(self) -> str:
        return "a stall that a fault planted"

    def missing(self) -> Sequence[int]:
        return ()


@dataclass
class Result:
    """What a run left: each rank's value, what happened, and what was found."""

    values: list[Any]
    trace: Trace
    findings: list[SimulationError] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)  # virtual microseconds, by rank

    @property
    def digest(self) -> str:
        return self.trace.digest


def diagnose(
    world: World, blocked: Mapping[int, Waiting], stacks: Mapping[int, list[str]]
) -> SimulationError:
    """Why no rank can go on: they disagree, one of them is gone, or they wait for each other."""
    disputed = collective_calls.disputes(world.votes)
    if disputed:
        return disputed[0]
    for waiting in blocked.values():
        if isinstance(waiting, Operation):
            calls = list(waiting.calls.values())
            if len({call.signature() for call in calls}) > 1:
                return collective_calls.mismatch(waiting, calls)
    stalled = [rank for rank, waiting in blocked.items() if isinstance(waiting, Stalled)]
    gone = sorted(world.failed or stalled)
    if not gone:
        left = [rank.index for rank in world.members if rank.left]
        return collective_calls.deadlock(blocked, left, stacks, world.lost)
    waiters = [rank for rank in blocked if rank not in stalled]
    where = (
        f", and {collective_calls.listed(waiters)} waited in {blocked[waiters[0]].describe()}"
        if waiters
        else ""
    )
    return RankLostError(
        expected="every rank to reach the calls that others wait in",
        received=f"{collective_calls.listed(gone)} {'failed' if world.failed else 'stalled'}{where}",
        remedy=f"see why {collective_calls.listed(gone)} stopped",
        ranks=gone,
        stacks=stacks,
    )


def judge(world: World) -> Result:
    """The result of a run that kept its promises; else its root cause is raised, the result attached."""
    world.recorder.finish()
    findings = world.findings
    result = Result(
        [rank.value for rank in world.members],
        world.recorder.trace,
        findings,
        world.schedule.clocks,
    )
    error = own_failure(world) or world.root
    if error is None:
        if world.watch.training is not None:
            world.watch.training.finish()
        findings.extend(collective_calls.disputes(world.votes))
        findings.extend(collective_calls.orphaned_work(world.members))
        findings.extend(map(collective_calls.orphaned_message, world.network.unreceived()))
        error = world.recorder.departure
    if (
        findings and world.strict and error is not findings[0]
    ):  # what was seen in the data came before what it led to
        findings[0].__cause__ = error
        error = findings[0]
    if error is not None:
        error.result = result
        raise error
    return result


def origin(error: BaseException | None) -> BaseException | None:
    """The simulator's own error, where a program answered it with another: `except Exception: sys.exit(1)`."""
    at = error
    while at is not None and not isinstance(at, SimulationError):
        at = at.__cause__ or at.__context__
    return at or error


def own_failure(world: World) -> SimulationError | None:
    """The first rank that raised an error of its own, before anything else went wrong."""
    if not world.failed:
        return None
    first = world.members[world.failed[0]]
    cause = origin(first.error)
    if isinstance(cause, SimulationError):
        return cause
    alike = [
        index
        for index in sorted(world.failed)
        if type(world.members[index].error) is type(first.error)
    ]
    frames = [
        f
        for f in reversed(traceback.extract_tb(cause.__traceback__ if cause else None))
        if is_users(f.filename)
    ]
    stacks = {first.index: [f"{f.filename}:{f.lineno} in {f.name}" for f in frames]}
    if isinstance(cause, Killed):
        return RankLostError(
            expected=f"rank {first.index} to live",
            received=f"its death at call {first.calls}, {cause}",
            remedy="make the others notice: a timeout, or a restart from the last checkpoint",
            ranks=alike,
            stacks=stacks,
        )
    own = (
        cause if isinstance(cause, IsobitError) else None
    )  # it has three parts of its own, which are not nested
    error = RankFailedError(
        expected=f"{collective_calls.listed(alike)} to return"
        + (f", with {own.expected}" if own else ""),
        received=f"{type(cause).__name__}: {own.received if own else cause}",
        remedy=own.remedy if own else "see its cause; what other ranks report follows from it",
        ranks=alike,
        stacks=stacks,
    )
    error.__cause__ = cause
    return error
