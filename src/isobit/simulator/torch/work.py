"""The handle of a call under way: waits by passing the baton, and writes results only when waited for."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import IsobitError
from isobit.simulator.checkers.early_reads import Memory, memory_of
from isobit.simulator.checkers.wire import Seen, find_change, look_at, overwritten
from isobit.simulator.collectives import Call
from isobit.simulator.faults import flip_bit
from isobit.simulator.network import Group, Message, Operation, Receive, Send, check_message, write
from isobit.simulator.rank import Rank, called_by_torch, current, strand, user_stack

TorchWork: Any = dist.Work


def begin(
    rank: Rank, group: Group, member: int, number: int, call: Call, value: Any
) -> PendingWork:
    """Adds a rank's part to a collective."""
    world = rank.world
    rank.communicating = True
    lost = world.arrive(rank, call, f"{call.kind} {group.name}#{number}")
    if call.asynchronous:
        world.schedule.pause(strand())
    call.clock = world.schedule.clocks[rank.index]
    if call.asynchronous and world.poison:
        poison_outputs(call, member)
    operation = world.network.join(group, member, number, call, lost)
    work = PendingWork(rank, operation, member, call, value)
    work.torchs_own = call.asynchronous and called_by_torch(sys._getframe(2))
    if call.asynchronous and not work.torchs_own:
        work.seen = look_at([*call.inputs, *call.outputs])
    if (
        call.asynchronous
        and "reads" in world.watch.chosen
        and not (call.kind == "broadcast" and call.root == member)
    ):
        work.memory = memory_of(call.outputs)
    rank.communicating = False
    return work


@torch.no_grad()
def poison_outputs(call: Call, member: int) -> None:
    """Whoever reads a result before waiting for it reads NaN, or the least integer."""
    if call.kind == "broadcast" and call.root == member:
        return
    memory = {tensor.untyped_storage().data_ptr() for tensor in call.outputs}
    if call.sent is None and any(
        tensor.untyped_storage().data_ptr() in memory for tensor in call.inputs
    ):
        call.sent = [tensor.data.clone() for tensor in call.inputs]
    if call.kind != "reduce" or call.root == member:
        for tensor in call.outputs:
            poison(tensor)


def poison(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).min or torch.iinfo(tensor.dtype).max)


class RankWork(TorchWork):  # type: ignore[misc]
    """What a rank holds of a call: `finish` runs once, at the first wait."""

    def __init__(self, owner: Rank, site: str, value: Any) -> None:
        super().__init__()
        self.owner, self.site, self.value = owner, site, value
        self.finished = False
        self.error: IsobitError | None = None
        self.memory: Memory = {}
        self.seen: Seen = []  # buffers that nobody may write to before the wait
        self.torchs_own = False
        owner.pending[id(self)] = self

    @property
    def what(self) -> str:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def settle(self) -> None:
        """Blocks until ready, then writes the results."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.finished:
            return True
        rank = current()
        self.owner.pending.pop(id(self), None)
        rank.communicating = True
        self.look_back(rank)
        try:
            self.settle()
        except IsobitError as error:
            self.error = error
            raise
        finally:
            self.finished = True
            rank.communicating = False
        rank.world.check(rank)
        return True

    def look_back(self, rank: Rank) -> None:
        """Reports a buffer that was written to since the call."""
        at, seen = find_change(self.seen), self.seen
        self.seen = []
        if at is not None:
            stack = user_stack(sys._getframe(2))
            rank.world.watch.findings.append(
                overwritten(rank.index, self.what, self.site, seen[at][0], at, stack)
            )

    def is_completed(self) -> bool:
        if self.finished:
            return True
        world = self.owner.world
        world.check(self.owner)
        if not self.ready() and not world.schedule.poll(strand()):
            self.wait()  # nothing can change any more: blocks, and the deadlock is named
        return self.ready() and self.wait()

    def is_success(self) -> bool:
        return self.finished and self.error is None

    def exception(self) -> Any:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self.value

    def get_future(self) -> torch.futures.Future[Any]:
        """DDP's reducer waits for futures in C++, where no baton can be passed: so this waits first."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.value)
        return future


class PendingWork(RankWork):
    """A collective under way."""

    def __init__(
        self, owner: Rank, operation: Operation, member: int, call: Call, value: Any
    ) -> None:
        self.operation, self.member = operation, member
        super().__init__(owner, call.site, value)

    @property
    def what(self) -> str:
        return f"{self.operation.kind} number {self.operation.number} of group {self.operation.group.name!r}"

    def ready(self) -> bool:
        return (
            self.operation.done
            and self.operation.at[self.member] <= self.owner.world.schedule.clocks[self.owner.index]
        )

    def settle(self) -> None:
        world, operation = self.owner.world, self.operation
        world.wait_for(self.owner, operation, operation.done)
        world.schedule.clocks[self.owner.index] = max(
            world.schedule.clocks[self.owner.index], operation.at[self.member]
        )
        world.schedule.pause(strand())
        if operation.failure is not None:
            raise world.again(operation.failure)
        write(operation.copies[self.member])
        operation.copies[self.member] = []


class MessageWork(RankWork):
    """A send or a receive under way."""

    waiting: Receive | Send

    @property
    def what(self) -> str:
        return self.waiting.describe()

    @classmethod
    @torch.no_grad()
    def sending(
        cls,
        rank: Rank,
        group: Group,
        member: int,
        target: int,
        tag: int,
        tensors: list[Tensor],
        site: str,
    ) -> MessageWork:
        world = rank.world
        rank.communicating = True
        call = Call(rank.index, "send", list(tensors), [], site=site)
        lost = world.arrive(rank, call, f"send {group.name} {member}>{target} tag {tag}")
        world.schedule.pause(strand())
        at = world.schedule.clocks[rank.index] + world.schedule.delay()
        sent = [tensor.data.clone(memory_format=torch.contiguous_format) for tensor in call.carried]
        message = Message(
            member, sent, at, site, rank.index, rank.calls, receiver=group.members[target]
        )
        message.digests = call.digests
        if call.flipped_to is not None and call.flipped_to.to == message.receiver:
            flip_bit(sent[0], call.flipped_to.element, call.flipped_to.bit)
        message.sending = Send(group, target, message)
        if not lost:
            world.network.send(group, target, tag, message)
        work = cls(rank, site, list(tensors))
        work.waiting = message.sending
        if call.sent is None and call.flipped_to is None:
            work.seen = look_at(tensors, sent)
        rank.communicating = False
        return work

    @classmethod
    def receiving(cls, rank: Rank, receive: Receive) -> MessageWork:
        world = rank.world
        source = "any" if receive.source is None else receive.source
        rank.communicating = True
        call = Call(rank.index, "recv", [], receive.tensors, site=receive.site)
        world.arrive(
            rank, call, f"recv {receive.group.name} {source}>{receive.member} tag {receive.tag}"
        )
        world.schedule.pause(strand())
        if world.poison:
            for tensor in receive.tensors:
                poison(tensor)
        work = cls(rank, receive.site, receive.tensors)
        work.waiting, work.memory = receive, memory_of(receive.tensors)
        world.network.receive(receive)
        rank.communicating = False
        return work

    def buffered(self) -> bool:
        """A send that nobody has to meet."""
        return isinstance(self.waiting, Send) and self.owner.world.sends == "buffered"

    def ready(self) -> bool:
        message = self.waiting.message
        clock = self.owner.world.schedule.clocks[self.owner.index]
        return self.buffered() or (message is not None and message.taken and message.at <= clock)

    def settle(self) -> None:
        if self.buffered():
            return
        world, waiting = self.owner.world, self.waiting
        world.wait_for(self.owner, waiting, waiting.message is not None and waiting.message.taken)
        message = waiting.message
        assert message is not None
        clocks = world.schedule.clocks
        clocks[self.owner.index] = max(clocks[self.owner.index], message.at)
        world.schedule.pause(strand())
        if isinstance(waiting, Receive):
            check_message(waiting, message)
            world.watch.deliver(waiting, message)
            write(list(zip(waiting.tensors, message.tensors, strict=True)))

    def source_rank(self) -> int:
        message = self.waiting.message if isinstance(self.waiting, Receive) else None
        return -1 if message is None else message.source

    _source_rank = source_rank
