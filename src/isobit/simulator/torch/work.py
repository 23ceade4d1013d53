"""Handles of calls in progress: `wait()` passes the baton, and only then are results written."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from isobit.errors import IsobitError
from isobit.simulator.call_sites import called_by_torch, user_stack
from isobit.simulator.checkers.overwritten_buffers import (
    Snapshot,
    find_change,
    find_shared_output,
    overwritten,
    take_snapshot,
)
from isobit.simulator.collectives import Call
from isobit.simulator.findings import copy_error
from isobit.simulator.memory import Memory, memory_of
from isobit.simulator.network import write
from isobit.simulator.operations import Group, Operation
from isobit.simulator.rank import Rank, current, current_strand
from isobit.simulator.run import Run

TorchWork: Any = dist.Work


def begin(run: Run, group: Group, member: int, number: int, call: Call) -> PendingWork:
    """Make a rank's call of a collective and return its handle."""
    rank = current()
    rank.communicating = True
    lost = run.begin_call(rank, call, f"{call.kind} {group.name}#{number}")
    if call.asynchronous:
        rank.schedule.pause(current_strand())
    call.clock = rank.clock
    if call.root in (-1, member) and (shared := find_shared_output(call, call.kind)):
        rank.findings.note(shared)
    if call.asynchronous and run.settings.poison:
        poison_outputs(call, member)
    operation = run.network.join(group, member, number, call, lost)
    if run.flight_recorder is not None:
        run.flight_recorder.note_collective(rank, number, call, operation)
    work = PendingWork(rank, operation, member, call)
    if call.asynchronous:
        work.torchs_own = called_by_torch(sys._getframe(2))
        if not work.torchs_own:
            work.snapshot = take_snapshot([*call.sources, *call.targets])
        if "reads" in rank.watch and not (call.kind == "broadcast" and call.root == member):
            work.memory = memory_of(call.targets)
    rank.communicating = False
    return work


@torch.no_grad()
def poison_outputs(call: Call, member: int) -> None:
    """Fill results with NaN, or the lowest integer, so that a read before `wait()` shows."""
    if call.kind == "broadcast" and call.root == member:
        return
    memory = {tensor.untyped_storage().data_ptr() for tensor in call.targets}
    if call.sent is None and any(
        tensor.untyped_storage().data_ptr() in memory for tensor in call.sources
    ):
        call.sent = [tensor.data.clone() for tensor in call.inputs]
    if call.kind != "reduce" or call.root == member:
        for tensor in call.targets:
            poison(tensor)


def poison(tensor: Tensor) -> None:
    """Fill a tensor with NaN or the lowest integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).min or torch.iinfo(tensor.dtype).max)


class RankWork(TorchWork):  # type: ignore[misc]
    """The handle of a call of one rank.

    Attributes:
        owner: The rank.
        site: The line of the program that made the call.
        value: What `result()` returns.
        memory: The memory of the results, if reads are watched.
        snapshot: Marks of the buffers that may not be written to before `wait()`.
        torchs_own: Whether torch made the call for itself.
    """

    def __init__(self, owner: Rank, site: str, value: Any) -> None:
        """Make the handle pending on its rank."""
        super().__init__()
        self.owner, self.site, self.value = owner, site, value
        self.finished = False
        self.error: IsobitError | None = None
        self.memory: Memory = {}
        self.snapshot: Snapshot = []
        self.torchs_own = False
        owner.pending[id(self)] = self

    @property
    def what(self) -> str:
        """The call in words."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether `wait()` would return at once."""
        raise NotImplementedError

    def settle(self) -> None:
        """Block until ready, then write the results; called once."""
        raise NotImplementedError

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.finished:
            return True
        rank = current()
        self.owner.pending.pop(id(self), None)
        rank.communicating = True
        self._check_buffers(rank)
        try:
            self.settle()
        except IsobitError as error:
            self.error = error
            raise
        finally:
            self.finished = True
            rank.communicating = False
        rank.check()
        return True

    def _check_buffers(self, rank: Rank) -> None:
        """Report a buffer that was written to since the call."""
        at, snapshot = find_change(self.snapshot), self.snapshot
        self.snapshot = []
        if at is not None:
            stack = user_stack(sys._getframe(2))
            buffer = snapshot[at][0]
            rank.findings.note(overwritten(rank.index, self.what, self.site, buffer, at, stack))

    @override
    def is_completed(self) -> bool:
        if self.finished:
            return True
        self.owner.check()
        if not self.ready() and not self.owner.schedule.poll(current_strand()):
            self.wait()  # nothing can change any more: block, so that the deadlock is reported
        return self.ready() and self.wait()

    @override
    def is_success(self) -> bool:
        return self.finished and self.error is None

    @override
    def exception(self) -> Any:
        return self.error

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def block_current_stream(self) -> None:
        self.wait()

    @override
    def result(self) -> Any:
        self.wait()
        return self.value

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, then return a completed future: DDP waits for futures in C++, where the baton cannot be passed."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.value)
        return future


class PendingWork(RankWork):
    """The handle of a collective."""

    def __init__(self, owner: Rank, operation: Operation, member: int, call: Call) -> None:
        """Make the handle of a collective of one rank."""
        self.operation, self.member = operation, member
        super().__init__(owner, call.site, list(call.targets))

    @property
    @override
    def what(self) -> str:
        operation = self.operation
        return f"{operation.kind} number {operation.number} of group {operation.group.name!r}"

    @override
    def ready(self) -> bool:
        return self.operation.done and self.operation.at[self.member] <= self.owner.clock

    @override
    def settle(self) -> None:
        owner, operation = self.owner, self.operation
        owner.wait_for(operation, operation.done)
        owner.clock = max(owner.clock, operation.at[self.member])
        owner.schedule.pause(current_strand())
        if operation.failure is not None:
            raise copy_error(operation.failure)
        write(operation.copies[self.member])
        operation.copies[self.member] = []
