"""Records of what is in progress between ranks: process groups, collectives, sends and receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from isobit.errors import IsobitError
from isobit.foundation.majority import name_ranks
from isobit.simulator.collectives import Call, Copies

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
