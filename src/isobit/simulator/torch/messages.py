"""Sends and receives: their handles, and the calls that make them."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from isobit.simulator.checkers.mismatch import check_message
from isobit.simulator.checkers.overwritten_buffers import take_snapshot
from isobit.simulator.collectives import Call
from isobit.simulator.faults import flip_bit
from isobit.simulator.memory import memory_of
from isobit.simulator.network import write
from isobit.simulator.operations import Group, Message, Receive, Send
from isobit.simulator.rank import Rank, current, current_strand
from isobit.simulator.run import Run
from isobit.simulator.torch.work import RankWork, poison


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
