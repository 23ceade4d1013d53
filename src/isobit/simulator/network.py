"""What is under way between ranks: collectives that gather their callers, messages, and who waits for which."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isobit.errors import ArgumentError, IsobitError, MismatchError, RankLostError, in_one_line
from isobit.simulator.checkers import collective_calls
from isobit.simulator.collectives import FRESH, PLANS, Call, Copies, misfits
from isobit.simulator.faults import Flip, flip_bit

if TYPE_CHECKING:
    from isobit.simulator.world import World

Key = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True)
class Group:
    """A process group as every member knows it: its name, how often that name was made, and its world ranks."""

    name: str
    incarnation: int
    members: tuple[int, ...]
    timeout: int  # virtual microseconds

    def describe(self) -> str:
        return f"group {self.name!r} ({collective_calls.listed(self.members)})"

    @property
    def key(self) -> Key:
        return self.name, self.incarnation, self.members


@dataclass
class Operation:
    """One collective of one group."""

    group: Group
    number: int
    kind: str
    calls: dict[int, Call] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # members whose part was dropped on its way
    done: bool = False
    failure: IsobitError | None = None
    at: list[int] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)

    def describe(self) -> str:
        return f"{self.kind} number {self.number} of {self.group.describe()}"

    def missing(self) -> Iterable[int]:
        return [
            r for i, r in enumerate(self.group.members) if i not in self.calls or i in self.lost
        ]


@dataclass(eq=False)
class Message:
    source: int  # member
    tensors: list[Tensor]
    at: int
    site: str
    sender: int  # world rank
    number: int
    taken: bool = False
    receiver: int = -1
    digests: list[str] = field(default_factory=list)
    sending: Send | None = None  # what its sender may wait on


@dataclass(eq=False)
class Receive:
    """A posted receive; `source` None takes from any member."""

    group: Group
    member: int
    source: int | None
    tag: int
    tensors: list[Tensor]
    site: str
    message: Message | None = None

    def describe(self) -> str:
        whom = "any rank" if self.source is None else f"rank {self.group.members[self.source]}"
        return f"recv from {whom} (tag {self.tag}) on {self.group.describe()}"

    def missing(self) -> Iterable[int]:
        if self.source is not None:
            return [self.group.members[self.source]]
        return [rank for member, rank in enumerate(self.group.members) if member != self.member]


@dataclass(eq=False)
class Send:
    """A send that waits for its receiver, as NCCL's do."""

    group: Group
    target: int
    message: Message

    def describe(self) -> str:
        return f"send to rank {self.group.members[self.target]} on {self.group.describe()}"

    def missing(self) -> Iterable[int]:
        return [self.group.members[self.target]]


class Network:
    """Carries what ranks hand it, in the order of the schedule."""

    def __init__(self, world: World) -> None:
        self.world, self.schedule = world, world.schedule
        self.open: dict[tuple[Key, int], Operation] = {}
        self.mail: dict[tuple[Key, int, int], deque[Message]] = {}
        self.posted: dict[tuple[Key, int, int], list[Receive]] = {}
        self._last: dict[tuple[Key, int, int], int] = {}

    def join(self, group: Group, member: int, number: int, call: Call, lost: bool) -> Operation:
        """Adds a rank's part; the last one carries the collective out."""
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
        group, clocks = operation.group, self.schedule.clocks
        calls = [operation.calls[member] for member in range(len(group.members))]
        operation.failure = self._refusal(operation, calls)
        if operation.failure is None:
            try:
                self._carry_out(operation, calls)
            except IsobitError as error:
                operation.failure = error
            except (
                Exception
            ) as error:  # of torch, on what one rank gave: no fault of the last to come
                operation.failure = ArgumentError(
                    expected=f"a {operation.kind} that torch can compute",
                    received=in_one_line(error),
                    remedy="see the message",
                )
        if isinstance(
            operation.failure, MismatchError
        ):  # wrong, even where programs catch what they are told
            self.world.tell(operation.failure)
        latest = max(call.clock for call in calls)
        operation.at = [latest + self.schedule.delay() for _ in calls]
        operation.done = True
        operation.calls = {}
        for rank, at in zip(group.members, operation.at, strict=True):
            self.schedule.wake_from(operation, rank, at)
        note = f"done {operation.kind} {group.name}#{operation.number}"
        self.world.recorder.note(calls[-1].rank, clocks[calls[-1].rank], note)

    def _refusal(self, operation: Operation, calls: list[Call]) -> IsobitError | None:
        if len({call.signature() for call in calls}) > 1:
            return collective_calls.mismatch(operation, calls)
        latest = max(calls, key=lambda call: call.clock)
        first = min(calls, key=lambda call: call.clock)
        if latest.clock - first.clock > operation.group.timeout:
            return RankLostError(
                expected=f"all ranks at {operation.describe()} within {operation.group.timeout / 1e6:g} s",
                received=f"rank {latest.rank} {(latest.clock - first.clock) / 1e6:g} s after rank {first.rank}",
                remedy=f"see what keeps rank {latest.rank}, or give the group a longer timeout",
                ranks=[latest.rank],
                stacks={latest.rank: [latest.site]},
            )
        return None

    @torch.no_grad()
    def _carry_out(self, operation: Operation, calls: list[Call]) -> None:
        for call in calls:
            self.world.watch.arrive(operation, call)
        plan = PLANS[operation.kind](calls)
        wrong = misfits(plan)
        if wrong:
            raise collective_calls.misfit(operation, wrong)
        flips = [call.flipped_to for call in calls if call.flipped_to is not None]
        kept: dict[int, Tensor] = {}
        operation.copies = []
        for call, copies in zip(calls, plan, strict=True):
            if any(flip.to == call.rank for flip in flips):
                copies = self._flip_last_hop(operation, call, copies, flips)
            elif call.asynchronous and operation.kind not in FRESH:
                # Others may change their inputs before this rank waits: what it will read is kept once for all.
                for _, source in copies:
                    if id(source) not in kept:
                        kept[id(source)] = source.clone()
                copies = [(out, kept[id(source)]) for out, source in copies]
            operation.copies.append(copies)
        for member, call in enumerate(calls):
            if not call.asynchronous:
                write(operation.copies[member])
                operation.copies[member] = []

    def _flip_last_hop(
        self, operation: Operation, call: Call, copies: Copies, flips: list[Flip]
    ) -> Copies:
        copies = [
            (out, source.clone(memory_format=torch.contiguous_format)) for out, source in copies
        ]
        for flip in flips:
            if flip.to == call.rank and copies:
                whole = copies[0][1].clone()
                flip_bit(copies[0][1], flip.element, flip.bit)
                self.world.watch.hop(operation, flip.rank, whole, copies[0][1], call.site)
        return copies

    def send(self, group: Group, target: int, tag: int, message: Message) -> None:
        """Delivered in order per pair; to a posted receive if one fits."""
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
        receiver = receive.group.members[receive.member]
        self.schedule.wake_from(receive, receiver, message.at)
        if message.sending is not None:
            self.schedule.wake_from(message.sending, message.sender, message.at)

    def unreceived(self) -> list[Message]:
        return [message for mail in self.mail.values() for message in mail]


def write(copies: Copies) -> None:
    """Into buffers as a transport does: below autograd, so that no version counter moves."""
    for out, source in copies:
        if out is not source:
            out.data.copy_(source if source.shape == out.shape else source.reshape(out.shape))


def check_message(receive: Receive, message: Message) -> None:
    """A receiver's buffers take what was sent."""
    sent = [(t.numel(), t.dtype) for t in message.tensors]
    taken = [(t.numel(), t.dtype) for t in receive.tensors]
    if sent != taken:
        receiver = receive.group.members[receive.member]
        raise MismatchError(
            expected=f"a buffer on rank {receiver} for what rank {message.sender} sends: {shown(message.tensors)}",
            received=shown(receive.tensors),
            remedy=f"make both alike: sent at {message.site}, received at {receive.site}",
            ranks=sorted({message.sender, receiver}),
            stacks={message.sender: [message.site], receiver: [receive.site]},
        )


def shown(tensors: list[Tensor]) -> str:
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
