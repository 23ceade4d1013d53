"""Handles of calls in progress: collectives, sends and receives."""

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
from isobit.simulator.checkers.mismatch import check_message
from isobit.simulator.checkers.pending_buffers import (
    Snapshot,
    find_change,
    find_shared_output,
    overwritten,
    take_snapshot,
)
from isobit.simulator.collectives import Call, Group, Message, Operation, Receive, Send
from isobit.simulator.faults import flip_bit
from isobit.simulator.findings import copy_error
from isobit.simulator.network import write
from isobit.simulator.rank import Memory, Rank, current, current_strand, memory_of
from isobit.simulator.run import Run

# Handles of calls in progress: `wait()` passes the baton, and only then are results written.

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


# Sends and receives: their handles, and the calls that make them.


class SendWork(RankWork):
    """The handle of a send."""

    def __init__(
        self, owner: Rank, waiting: Send, tensors: list[Tensor], site: str, buffered: bool
    ) -> None:
        """Make the handle of a send; it waits for the receiver unless the send is buffered."""
        super().__init__(owner, site, tensors)
        self.waiting, self.buffered = waiting, buffered

    @property
    @override
    def what(self) -> str:
        return self.waiting.describe()

    @override
    def ready(self) -> bool:
        message = self.waiting.message
        return self.buffered or (message.taken and message.at <= self.owner.clock)

    @override
    def settle(self) -> None:
        if not self.buffered:
            message = self.waiting.message
            self.owner.wait_for(self.waiting, message.taken)
            self.owner.clock = max(self.owner.clock, message.at)
            self.owner.schedule.pause(current_strand())

    def source_rank(self) -> int:
        """Return -1: only receives have a source."""
        return -1

    _source_rank = source_rank


class ReceiveWork(RankWork):
    """The handle of a receive."""

    def __init__(self, run: Run, owner: Rank, receive: Receive) -> None:
        """Make the handle of a posted receive."""
        super().__init__(owner, receive.site, receive.tensors)
        self.run, self.waiting, self.memory = run, receive, memory_of(receive.tensors)

    @property
    @override
    def what(self) -> str:
        return self.waiting.describe()

    @override
    def ready(self) -> bool:
        message = self.waiting.message
        return message is not None and message.at <= self.owner.clock

    @override
    def settle(self) -> None:
        owner, receive = self.owner, self.waiting
        owner.wait_for(receive, receive.message is not None)
        message = receive.message
        assert message is not None
        owner.clock = max(owner.clock, message.at)
        owner.schedule.pause(current_strand())
        check_message(receive, message)
        self.run.watch.on_message(receive, message)
        write(list(zip(receive.tensors, message.tensors, strict=True)))

    def source_rank(self) -> int:
        """Return the member whose message was received, or -1."""
        return -1 if self.waiting.message is None else self.waiting.message.source

    _source_rank = source_rank


@torch.no_grad()
def begin_send(
    run: Run, group: Group, member: int, target: int, tag: int, tensors: list[Tensor], site: str
) -> SendWork:
    """Send tensors to a member of a group and return the handle."""
    rank = current()
    rank.communicating = True
    call = Call(rank.index, "send", list(tensors), [], site=site)
    lost = run.begin_call(rank, call, f"send {group.name} {member}>{target} tag {tag}")
    rank.schedule.pause(current_strand())
    at = rank.clock + rank.schedule.delay()
    sent = [tensor.data.clone(memory_format=torch.contiguous_format) for tensor in call.carried]
    message = Message(member, sent, at, site, rank.index, group.members[target])
    message.digests = call.digests
    if call.flipped_to is not None and call.flipped_to.to == message.receiver:
        flip_bit(sent[0], call.flipped_to.element, call.flipped_to.bit)
    message.sending = Send(group, target, message)
    if not lost:
        run.network.send(group, target, tag, message)
    if run.flight_recorder is not None:
        run.flight_recorder.note_send(rank, group, target, message)
    buffered = run.settings.sends == "buffered"
    work = SendWork(rank, message.sending, list(tensors), site, buffered)
    if call.sent is None and call.flipped_to is None:
        work.snapshot = take_snapshot(tensors, sent)
    rank.communicating = False
    return work


def begin_receive(run: Run, receive: Receive) -> ReceiveWork:
    """Post a receive and return the handle."""
    rank = current()
    source = "any" if receive.source is None else receive.source
    rank.communicating = True
    call = Call(rank.index, "recv", [], receive.tensors, site=receive.site)
    what = f"recv {receive.group.name} {source}>{receive.member} tag {receive.tag}"
    run.begin_call(rank, call, what)
    rank.schedule.pause(current_strand())
    if run.settings.poison:
        for tensor in receive.tensors:
            poison(tensor)
    work = ReceiveWork(run, rank, receive)
    run.network.receive(receive)
    if run.flight_recorder is not None:
        run.flight_recorder.note_receive(rank, receive)
    rank.communicating = False
    return work
