"""Records of a profile; without torch, so that reports can be drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Account:
    """Where the time of a step, or of several, went: `parts` add up to `total` in integer nanoseconds.

    Attributes:
        rank: Whose time it is.
        step: The name of the step, such as "ProfilerStep#4", or "all steps".
        start: When it begins, in nanoseconds of the trace's clock.
        total: How long it takes.
        parts: Nanoseconds by cause.
        hidden_communication: Nanoseconds of collectives behind compute; not a part.
        hidden_copies: Nanoseconds of copies behind compute or collectives; not a part.

    Raises:
        ArithmeticError: If the parts do not add up.

    Example:
        >>> from isobit.profiling import Account
        >>> Account(0, "step", start=5, total=10, parts={"compute": 4, "idle: data loader": 6}).idle
        6
    """

    rank: int
    step: str
    start: int
    total: int
    parts: dict[str, int]
    hidden_communication: int = 0
    hidden_copies: int = 0

    def __post_init__(self) -> None:
        found = sum(self.parts.values())
        if found != self.total or min(self.parts.values(), default=0) < 0:
            raise ArithmeticError(
                f"{self.step} of rank {self.rank}: {found} of {self.total} ns accounted for"
            )

    @property
    def idle(self) -> int:
        """Nanoseconds in which neither compute, communication nor a copy ran."""
        return sum(ns for cause, ns in self.parts.items() if cause.startswith("idle: "))

    def share(self, cause: str) -> float:
        """Return the share of a cause in the time."""
        return self.parts.get(cause, 0) / self.total if self.total else 0.0

    @classmethod
    def of_all(cls, accounts: Sequence[Account]) -> Account:
        """Return the account of several steps of one rank together."""
        parts: dict[str, int] = {}
        for account in accounts:
            for cause, ns in account.parts.items():
                parts[cause] = parts.get(cause, 0) + ns
        return cls(
            rank=accounts[0].rank,
            step="all steps",
            start=accounts[0].start,
            total=sum(account.total for account in accounts),
            parts=parts,
            hidden_communication=sum(account.hidden_communication for account in accounts),
            hidden_copies=sum(account.hidden_copies for account in accounts),
        )


@dataclass(frozen=True)
class RankProfile:
    """The profile of one process.

    Attributes:
        name: The name of its trace.
        digest: BLAKE3 of the trace's JSON.
        rank: Its rank.
        device: The name of the GPU, or "CPU".
        whole: Where the time of all its steps went.
        steps: Where the time of each step went.
        outside: Nanoseconds of device work outside of every step.
        notes: What was left out, or what the trace does not have.
    """

    name: str
    digest: str
    rank: int
    device: str
    whole: Account
    steps: tuple[Account, ...]
    outside: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """What the traces of one run show.

    Attributes:
        ranks: One profile per trace, by rank.
        world: The number of ranks of the run, if the traces have it; else 0.
        notes: What could not be told.
    """

    ranks: tuple[RankProfile, ...]
    world: int
    notes: tuple[str, ...] = ()
