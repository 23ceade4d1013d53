"""The network between ranks: carries out collectives and delivers messages, in virtual time."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from isobit.errors import ArgumentError, IsobitError, MismatchError, RankLostError, in_one_line
from isobit.simulator.checkers.mismatch import CallSites, buffer_mismatch, mismatch
from isobit.simulator.checkers.sent_data import DataWatch
from isobit.simulator.collectives import (
    FRESH,
    PLANS,
    Call,
    Copies,
    Group,
    GroupKey,
    Message,
    Operation,
    Receive,
    misfits,
)
from isobit.simulator.faults import Flip, flip_bit
from isobit.simulator.findings import Findings
from isobit.simulator.schedule import Recorder, Schedule


class Network:
    """Collectives that wait for members, messages that wait for receivers, and receives that wait for messages."""

    def __init__(
        self, schedule: Schedule, recorder: Recorder, findings: Findings, watch: DataWatch
    ) -> None:
        """Start with nothing in transit."""
        self.schedule, self.recorder = schedule, recorder
        self.findings, self.watch = findings, watch
        self.sites = CallSites()
        self.open: dict[tuple[GroupKey, int], Operation] = {}
        self.mail: dict[tuple[GroupKey, int, int], deque[Message]] = {}
        self.posted: dict[tuple[GroupKey, int, int], list[Receive]] = {}
        self._last: dict[tuple[GroupKey, int, int], int] = {}

    def join(self, group: Group, member: int, number: int, call: Call, lost: bool) -> Operation:
        """Add a member's call to a collective; the last call carries it out."""
        key = (group.key, number)
        operation = self.open.get(key)
        if operation is None:
            operation = self.open[key] = Operation(group, number, call.kind)
        operation.calls[member] = call
        if lost:
            operation.lost.add(member)
        if len(operation.calls) == len(group.members) and not operation.lost:
            del self.open[key]
            self._complete(operation)
        return operation

    def _complete(self, operation: Operation) -> None:
        group = operation.group
        calls = [operation.calls[member] for member in range(len(group.members))]
        operation.failure = self._find_failure(operation, calls)
        if operation.failure is None:
            try:
                self._carry_out(operation, calls)
            except IsobitError as error:
                operation.failure = error
            except Exception as error:  # of torch; every rank raises it, not only the last to call
                operation.failure = ArgumentError(
                    expected=f"a {operation.kind} that torch can compute",
                    received=in_one_line(error),
                    remedy="give the collective tensors and a reduction that torch supports",
                )
        if isinstance(operation.failure, MismatchError):
            operation.failure.note = self.sites.before(group.key, operation.number)
            self.findings.stop(operation.failure)  # reported even if the program catches it
        stacks = {call.rank: call.stack for call in calls}
        self.sites.note(group.key, operation.number, operation.describe(), stacks)
        latest = max(call.clock for call in calls)
        operation.at = [latest + self.schedule.delay() for _ in calls]
        operation.done = True
        operation.calls = {}
        for rank, at in zip(group.members, operation.at, strict=True):
            self.schedule.wake_from(operation, rank, at)
        last = calls[-1].rank
        note = f"done {operation.kind} {group.name}#{operation.number}"
        self.recorder.note(last, self.schedule.clocks[last], note)

    def _find_failure(self, operation: Operation, calls: list[Call]) -> IsobitError | None:
        if len({call.signature() for call in calls}) > 1:
            return mismatch(operation, calls)
        latest = max(calls, key=lambda call: call.clock)
        first = min(calls, key=lambda call: call.clock)
        apart, timeout = latest.clock - first.clock, operation.group.timeout
        if apart > timeout:
            return RankLostError(
                expected=f"all ranks at {operation.describe()} within {timeout / 1e6:g} s",
                received=f"rank {latest.rank} {apart / 1e6:g} s after rank {first.rank}",
                remedy=f"find what delays rank {latest.rank}, or give the group a longer timeout",
                ranks=[latest.rank],
                stacks={latest.rank: [latest.site]},
            )
        return None

    @torch.no_grad()
    def _carry_out(self, operation: Operation, calls: list[Call]) -> None:
        for call in calls:
            self.watch.on_complete(operation, call)
        plan = PLANS[operation.kind](calls)
        wrong = misfits(plan)
        if wrong:
            raise buffer_mismatch(operation, wrong)
        flips = [call.flipped_to for call in calls if call.flipped_to is not None]
        kept: dict[int, Tensor] = {}
        operation.copies = []
        for call, copies in zip(calls, plan, strict=True):
            if any(flip.to == call.rank for flip in flips):
                copies = self._flip_result(operation, call, copies, flips)
            elif call.asynchronous and operation.kind not in FRESH:
                # Other ranks may change their inputs before this rank waits: copy each source once.
                for _, source in copies:
                    if id(source) not in kept:
                        kept[id(source)] = source.clone()
                copies = [(out, kept[id(source)]) for out, source in copies]
            operation.copies.append(copies)
        for member, call in enumerate(calls):
            if not call.asynchronous:
                write(operation.copies[member])
                operation.copies[member] = []

    def _flip_result(
        self, operation: Operation, call: Call, copies: Copies, flips: list[Flip]
    ) -> Copies:
        copies = [
            (out, source.clone(memory_format=torch.contiguous_format)) for out, source in copies
        ]
        for flip in flips:
            if flip.to == call.rank and copies:
                intact = copies[0][1].clone()
                flip_bit(copies[0][1], flip.element, flip.bit)
                self.watch.on_result(operation, flip.rank, intact, copies[0][1], call.site)
        return copies

    def send(self, group: Group, target: int, tag: int, message: Message) -> None:
        """Deliver a message to a posted receive, or keep it. Messages of a pair of ranks stay in order."""
        pair = (group.key, message.source, target)
        message.at = self._last[pair] = max(self._last.get(pair, 0), message.at)
        key = (group.key, target, tag)
        for receive in self.posted.get(key, []):
            if receive.source is None or receive.source == message.source:
                self.posted[key].remove(receive)
                self._match(receive, message)
                return
        self.mail.setdefault(key, deque()).append(message)

    def receive(self, receive: Receive) -> None:
        """Take the earliest message that fits, or post the receive."""
        key = (receive.group.key, receive.member, receive.tag)
        fitting = [
            m
            for m in self.mail.get(key, ())
            if receive.source is None or m.source == receive.source
        ]
        if not fitting:
            self.posted.setdefault(key, []).append(receive)
            return
        message = min(fitting, key=lambda m: m.at)
        self.mail[key].remove(message)
        self._match(receive, message)

    def _match(self, receive: Receive, message: Message) -> None:
        receive.message, message.taken = message, True
        self.schedule.wake_from(receive, receive.receiver, message.at)
        if message.sending is not None:
            self.schedule.wake_from(message.sending, message.sender, message.at)

    def unreceived(self) -> list[Message]:
        """Return the messages that no rank has received."""
        return [message for mail in self.mail.values() for message in mail]


def write(copies: Copies) -> None:
    """Copy into buffers as a transport does, below autograd: no version counter changes."""
    for out, source in copies:
        if out is not source:
            out.data.copy_(source if source.shape == out.shape else source.reshape(out.shape))
