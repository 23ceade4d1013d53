"""Records of a profile; without torch, so that reports can be drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any


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
class Brick:
    """Device time of one operator at one set of shapes, one kind of transfer, or one collective.

    Attributes:
        kind: "kernel", "transfer", "collective", or "earlier" for work from before the trace.
        operator: The operator, the direction of a copy, or the collective.
        shapes, dtypes: Of the operator's inputs, where recorded.
        module: The module or annotation in which most of it was launched.
        calls: How often the operator was called.
        slices: How many kernels or copies ran.
        ns: Their time. On a CPU the time of an operator without those inside it.
        wall: Nanoseconds of the steps that are this brick's alone: of slices that run at once the last to start counts,
            and compute before communication before copies. All bricks and idle time add up to the steps.
        bytes: Of transfers.
        bound: Nanoseconds that all calls take at least; 0 if no bound is known.
        bound_by: What sets the bound: "memory", "bf16 products", "host link"; "cache" if it was faster than memory, so
            that the bound does not apply.
        flops, moved: Operations and bytes that all calls need, where known.
        strict: Nanoseconds that it takes at least even if the cache holds what it can.
        kernels: Up to three kernels, the longest first.
        order: What the order of addition depends on, by the names of its kernels: "row length", "tile", "shape",
            "ranks", "run", "no sum" or "unknown"; "" on a CPU, whose kernels have no names in a trace.
        order_words: The same as a sentence, with the tile where the name has it.
    """

    kind: str
    operator: str
    shapes: str
    dtypes: str
    module: str
    calls: int
    slices: int
    ns: int
    wall: int = 0
    bytes: int = 0
    bound: int = 0
    bound_by: str = ""
    strict: int = 0
    kernels: tuple[str, ...] = ()
    order: str = ""
    order_words: str = ""
    flops: int = 0
    moved: int = 0

    @property
    def of_bound(self) -> float | None:
        """The bound divided by the time: 1 is as fast as the device allows. None if no bound is known."""
        return self.bound / self.ns if self.bound and self.ns else None


@dataclass(frozen=True)
class Block:
    """Device time of one block of the model in all steps, in nanoseconds."""

    name: str
    forward: int
    backward: int


@dataclass(frozen=True)
class CoreTime:
    """What the machine took from a process in one step, in nanoseconds.

    Attributes:
        wall: How long the step took.
        ran: How long its main thread had a core.
        waited: How long its main thread was ready to run and had no core.
        senders_ran: How long the one of its threads that send and receive had a core that had it longest.
        senders_waited: How long these threads were ready to run and had no core, added up.
        stolen: How long the host of a virtual machine used a core for others, of the core from which it took most.
    """

    wall: int
    ran: int
    waited: int
    senders_ran: int
    senders_waited: int
    stolen: int

    @property
    def lost(self) -> int:
        """How long the main thread had no core, at most."""
        return min(self.wall, self.waited + self.stolen)


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
        bricks: Device time by operator and shapes, transfer and collective, the longest first.
        blocks: Device time by block of the model, if modules were recorded.
        peaks: The source of the device's peak rates; "" if they are not known.
        outside: Nanoseconds of device work outside of every step.
        core_times: By step, how long its threads had a core, where the recording has it: that of
            `isobit profile train.py` does, on Linux.
        notes: What was left out, or what the trace does not have.
    """

    name: str
    digest: str
    rank: int
    device: str
    whole: Account
    steps: tuple[Account, ...]
    bricks: tuple[Brick, ...] = ()
    blocks: tuple[Block, ...] = ()
    peaks: str = ""
    outside: int = 0
    core_times: dict[str, CoreTime] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def device_time(self) -> int:
        """Nanoseconds of all bricks of the steps, without work from before the trace."""
        return sum(brick.ns for brick in self.bricks if brick.kind != "earlier")

    @property
    def bounded_time(self) -> int:
        """Nanoseconds of the bricks with a known bound."""
        return sum(brick.ns for brick in self.bricks if brick.bound)


@dataclass(frozen=True)
class Slice:
    """A piece of a rank's time, as evidence: its start on the trace's clock and its length, in nanoseconds."""

    rank: int
    start: int
    ns: int
    name: str


@dataclass(frozen=True)
class Finding:
    """Something that costs time.

    Attributes:
        rule: Which one, such as "data-loader".
        severity: "warning", or "info" for what costs no time.
        rank: Where.
        ns: What it costs in all steps.
        share: Of the steps, or of the device's time where the finding is about a brick.
        detail: What was found.
        evidence: The longest slices.
        remedy: What to do.
        cost: "measured", "at most", or "measured, saving by replay".
    """

    rule: str
    severity: str
    rank: int
    ns: int
    share: float
    detail: str
    evidence: tuple[Slice, ...]
    remedy: str
    cost: str


@dataclass(frozen=True)
class Lateness:
    """How late a rank came to a collective, in nanoseconds: `parts` add up to `ns`.

    Attributes:
        rank: The last rank.
        against: The median rank.
        ns: How much later the last rank arrived.
        parts: For each cause, its time on the last rank minus that on the median rank.

    Raises:
        ArithmeticError: If the parts do not add up.
    """

    rank: int
    against: int
    ns: int
    parts: dict[str, int]

    def __post_init__(self) -> None:
        if sum(self.parts.values()) != self.ns:
            raise ArithmeticError(
                f"{sum(self.parts.values())} of {self.ns} ns of lateness have a cause"
            )

    @property
    def cause(self) -> str:
        """The largest part; "" if the rank was not late."""
        return max(self.parts, key=lambda cause: self.parts[cause], default="")


@dataclass(frozen=True)
class Collective:
    """One collective on all its ranks.

    Attributes:
        number: Its place among all.
        name: Such as "allreduce".
        detail: Elements or shapes, where recorded.
        step: The step in which it was launched.
        at: When the last rank arrived, on that rank's clock.
        last: The rank that arrived last.
        waits: By rank, nanoseconds from its arrival to that of the last rank.
        moves: By rank, nanoseconds from the last arrival to its end.
        lateness: Why the last rank was late.
        apart: Whether it began when the ones before had ended on every rank, so that waits may be added.
    """

    number: int
    name: str
    detail: str
    step: str
    at: int
    last: int
    waits: dict[int, int]
    moves: dict[int, int]
    lateness: Lateness
    apart: bool

    @property
    def waiting(self) -> int:
        """Nanoseconds of all ranks."""
        return sum(self.waits.values())

    @property
    def moving(self) -> int:
        """Nanoseconds of all ranks."""
        return sum(self.moves.values())


@dataclass(frozen=True)
class Profile:
    """What the traces of one run show.

    Attributes:
        ranks: One profile per trace, by rank.
        world: The number of ranks of the run, if the traces have it; else 0.
        collectives: Those that were matched over all ranks.
        waited_for: Nanoseconds that all ranks together waited for each rank, the most waited for first.
        causes: Of each rank that was waited for: why it was late, in nanoseconds that add up to its lateness.
        savings: Of each such rank: nanoseconds that the run would take less if the rank were as the others, by replay;
            None if the replay does not reproduce the recording.
        findings: What costs time, the costliest first.
        notes: What could not be told.
    """

    ranks: tuple[RankProfile, ...]
    world: int
    collectives: tuple[Collective, ...] = ()
    waited_for: dict[int, int] = field(default_factory=dict)
    causes: dict[int, dict[str, int]] = field(default_factory=dict)
    savings: dict[int, int | None] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if nothing that costs time was found, else 1."""
        return int(any(one.severity == "warning" for one in self.findings))


@dataclass(frozen=True)
class Row:
    """One brick, or one reason of idle time, in two runs: nanoseconds of all steps, calls and kernels."""

    kind: str
    operator: str
    shapes: str
    dtypes: str
    left: int
    left_calls: int
    left_kernels: tuple[str, ...]
    right: int
    right_calls: int
    right_kernels: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Two runs brick by brick.

    Attributes:
        names, digests, devices: Of both traces.
        steps: How many steps each has.
        totals: Nanoseconds of all steps of each.
        rows: The largest difference per step first. Their differences add up to that of the runs.
        notes: What is left out.

    Raises:
        ArithmeticError: If the rows do not add up.
    """

    names: tuple[str, str]
    digests: tuple[str, str]
    devices: tuple[str, str]
    steps: tuple[int, int]
    totals: tuple[int, int]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sums = sum(row.left for row in self.rows), sum(row.right for row in self.rows)
        if sums != self.totals:
            raise ArithmeticError(f"{sums} of {self.totals} ns are in rows")

    def per_step(self, row: Row) -> tuple[float, float]:
        """Return the nanoseconds per step of a row in both runs."""
        return row.left / self.steps[0], row.right / self.steps[1]


@dataclass(frozen=True)
class Claim:
    """One claim of a budget file: a relation, what it is about, and its limits."""

    id: str
    relation: str
    where: dict[str, str]
    limits: dict[str, Any]
    if_fails: str = ""

    def means(self, brick: Brick) -> bool:
        """Whether it is about a brick: by operator (names and * patterns, split by |), shapes and kind."""
        names = self.where.get("operator", "*").split("|")
        return (
            brick.kind == self.where.get("kind", brick.kind)
            and brick.shapes == self.where.get("shapes", brick.shapes)
            and any(fnmatchcase(brick.operator, name) for name in names)
        )


@dataclass(frozen=True)
class Budgets:
    """A budget file."""

    id: str
    path: str
    claims: tuple[Claim, ...]
