"""Operations between ranks: records of what is in progress, and what each collective computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, IsobitError
from isobit.foundation.majority import name_ranks
from isobit.simulator.faults import Flip

# What each collective computes: for each member, the copies to make as (destination, source) pairs.
#
# Reductions are left folds in rank order, ((0 + 1) + 2) + …, in the dtype of the tensor.

Copies = list[tuple[Tensor, Tensor]]
Signature = tuple[Any, ...]  # kind, root, op, dtypes, shapes


@dataclass
class Call:
    """One rank's call of a collective.

    Attributes:
        rank: The world rank.
        inputs, outputs: What is sent and received, one tensor per member where each has its own share.
        sources, targets: The tensors of the program that these are, or are shares of: one tensor for 512 shares.
        root: The member at the root, or -1.
        site: The line of the program that made the call.
        stack: The frames of the program, innermost first.
        members: The world ranks of the group.
        torchs_file: The file of torch that made the call for the program, such as that of FSDP.
        clock: When it was made, in virtual microseconds.
        marks, digests: Of the inputs at the time of the call; see `checkers/sent_data.py`.
        sent: The data in transit, if it is not the inputs themselves.
        flipped_to: The fault that flips a bit on the way to one rank.
    """

    rank: int
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    root: int = -1
    op: Any = None
    asynchronous: bool = False
    site: str = ""
    stack: tuple[str, ...] = ()
    members: tuple[int, ...] = ()
    torchs_file: str = ""
    clock: int = 0
    marks: list[int | str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    sent: list[Tensor] | None = None
    flipped_to: Flip | None = None
    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    _signature: Signature | None = None

    def __post_init__(self) -> None:
        """Take inputs and outputs for whole tensors, unless others were given."""
        self.sources, self.targets = self.sources or self.inputs, self.targets or self.outputs

    @property
    def carried(self) -> list[Tensor]:
        """The tensors in transit."""
        return self.inputs if self.sent is None else self.sent

    def signature(self) -> Signature:
        """Return what must be equal on all members: kind, root, reduction, dtypes and shapes."""
        if self._signature is None:
            measured = self.inputs or self.outputs
            if self.kind in ("all_gather", "reduce_scatter", "scatter"):
                measured = self.outputs  # only the root has the inputs of a scatter
            shapes: Any = tuple([tensor.shape for tensor in measured])
            if self.kind == "all_to_all":  # each pair of ranks has a shape of its own
                shapes = None
            op = None if self.op is None else name_of(self.op)
            dtypes = tuple([tensor.dtype for tensor in measured])
            self._signature = (self.kind, self.root, op, dtypes, shapes)
        return self._signature


def name_of(op: Any) -> str:
    """Return the name of a torch.distributed reduction."""
    return str(getattr(op, "op", op).name)


FOLDS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduce_tensors(op: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Reduce tensors by a left fold in rank order, into a new tensor."""
    name = name_of(op)
    fold = FOLDS.get(name)
    if fold is None:
        raise ArgumentError(
            expected=f"a reduction out of {', '.join(FOLDS)}",
            received=name,
            remedy="use one of these reductions",
        )
    if name == "PREMUL_SUM":
        factor = op.__getstate__()[1]
        tensors = [tensor * factor for tensor in tensors]
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        fold(total, tensor, out=total)
    if name == "AVG":
        exact = total.is_floating_point() or total.is_complex()
        total = total.div_(len(tensors), rounding_mode=None if exact else "trunc")
    return total


def all_reduce(calls: list[Call]) -> list[Copies]:
    """Give every member the reduction of all inputs."""
    totals = [
        reduce_tensors(calls[0].op, [call.carried[i] for call in calls])
        for i in range(len(calls[0].inputs))
    ]
    return [list(zip(call.outputs, totals, strict=True)) for call in calls]


def reduce(calls: list[Call]) -> list[Copies]:
    """Give the root the reduction of all inputs."""
    copies = all_reduce(calls)
    return [pairs if member == calls[0].root else [] for member, pairs in enumerate(copies)]


def broadcast(calls: list[Call]) -> list[Copies]:
    """Give every member the input of the root."""
    root = calls[calls[0].root]
    return [
        [] if call is root else list(zip(call.outputs, root.carried, strict=True)) for call in calls
    ]


def all_gather(calls: list[Call]) -> list[Copies]:
    """Give every member all inputs; `outputs` holds a slot per member for each input in turn."""
    return [
        [
            (call.outputs[item * len(calls) + member], other.carried[item])
            for item in range(len(calls[0].inputs))
            for member, other in enumerate(calls)
        ]
        for call in calls
    ]


def reduce_scatter(calls: list[Call]) -> list[Copies]:
    """Give each member its slot of the reduction; `inputs` holds a slot per member for each output in turn."""
    return [
        [
            (
                out,
                reduce_tensors(
                    call.op, [other.carried[item * len(calls) + member] for other in calls]
                ),
            )
            for item, out in enumerate(call.outputs)
        ]
        for member, call in enumerate(calls)
    ]


def gather(calls: list[Call]) -> list[Copies]:
    """Give the root all inputs."""
    copies: list[Copies] = [[] for _ in calls]
    root = calls[0].root
    copies[root] = [
        (slot, call.carried[0]) for slot, call in zip(calls[root].outputs, calls, strict=True)
    ]
    return copies


def scatter(calls: list[Call]) -> list[Copies]:
    """Give each member its slot of the root's input."""
    slots = calls[calls[0].root].carried
    return [[(call.outputs[0], slot)] for call, slot in zip(calls, slots, strict=True)]


def all_to_all(calls: list[Call]) -> list[Copies]:
    """Give each member its slot of every input."""
    return [
        [(call.outputs[source], other.carried[member]) for source, other in enumerate(calls)]
        for member, call in enumerate(calls)
    ]


def barrier(calls: list[Call]) -> list[Copies]:
    """Copy nothing."""
    return [[] for _ in calls]


PLANS: dict[str, Callable[[list[Call]], list[Copies]]] = {
    function.__name__: function
    for function in (
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        reduce_scatter,
        gather,
        scatter,
        all_to_all,
        barrier,
    )
}
FRESH = {"all_reduce", "reduce", "reduce_scatter"}  # their results are new tensors


def misfits(copies: list[Copies]) -> list[tuple[int, str]]:
    """Return members whose buffers do not fit the data sent to them."""
    return [
        (member, f"{tuple(source.shape)} {source.dtype} into {tuple(out.shape)} {out.dtype}")
        for member, pairs in enumerate(copies)
        for out, source in pairs
        if out.numel() != source.numel() or out.dtype != source.dtype
    ]


# Records of what is in progress between ranks: process groups, collectives, sends and receives.

GroupKey = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True)
class Group:
    """A process group.

    Attributes:
        name: The name that torch gave it.
        incarnation: How often a group of this name was made before.
        members: The world rank of each member.
        timeout: In virtual microseconds.
    """

    name: str
    incarnation: int
    members: tuple[int, ...]
    timeout: int

    def describe(self) -> str:
        """Return the group in words."""
        return f"group {self.name!r} ({name_ranks(self.members)})"

    @property
    def key(self) -> GroupKey:
        """What identifies the group among all groups of the run."""
        return self.name, self.incarnation, self.members


@dataclass
class Operation:
    """One collective of one group.

    Attributes:
        calls: The calls of the members that have arrived.
        lost: Members whose data was dropped.
        failure: Why it could not be carried out.
        at: When each member has its result, in virtual microseconds.
        copies: What each member still has to copy when it waits.
    """

    group: Group
    number: int
    kind: str
    calls: dict[int, Call] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    done: bool = False
    failure: IsobitError | None = None
    at: list[int] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)

    def describe(self) -> str:
        """Return the collective in words."""
        return f"{self.kind} number {self.number} of {self.group.describe()}"

    def missing(self) -> Iterable[int]:
        """Return the ranks that have not called it."""
        return [
            r for i, r in enumerate(self.group.members) if i not in self.calls or i in self.lost
        ]


@dataclass(eq=False)
class Message:
    """A message from one rank to another; `source` is a member of the group, the others are world ranks."""

    source: int
    tensors: list[Tensor]
    at: int
    site: str
    sender: int
    receiver: int
    taken: bool = False
    digests: list[str] = field(default_factory=list)
    sending: Send | None = None  # what its sender may wait for


@dataclass(eq=False)
class Receive:
    """A posted receive; `source` None receives from any member."""

    group: Group
    member: int
    source: int | None
    tag: int
    tensors: list[Tensor]
    site: str
    message: Message | None = None

    @property
    def receiver(self) -> int:
        """The world rank that receives."""
        return self.group.members[self.member]

    def describe(self) -> str:
        """Return the receive in words."""
        sender = "any rank" if self.source is None else f"rank {self.group.members[self.source]}"
        return f"recv from {sender} (tag {self.tag}) on {self.group.describe()}"

    def missing(self) -> Iterable[int]:
        """Return the ranks that may send."""
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
        """Return the send in words."""
        return f"send to rank {self.group.members[self.target]} on {self.group.describe()}"

    def missing(self) -> Iterable[int]:
        """Return the rank that receives."""
        return [self.group.members[self.target]]
