"""Frozen records that several layers share, and their JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from isobit.foundation.plain_text import plain_json

# What a contract must show at each level.
RUNGS = {
    "L0": "well-formed, every obligation linked to a claim",
    "L1": "schema, operator check, shapes and dtypes by construction",
    "L2": "every falsification test ran, every sabotage was caught",
    "L3": "at least 10,000 inputs",
    "L4": "proved, by the engine named",
}


@dataclass(frozen=True)
class Difference:
    """How two tensors differ: in `what` (dtype, shape or bits), and for bits at which element first."""

    what: str
    left: str
    right: str
    index: tuple[int, ...] | None = None
    ulps: int | None = None
    count: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        if self.what != "bits":
            return f"{self.what} differ: {self.left} and {self.right}"
        apart = "not comparable" if self.ulps is None else f"{self.ulps} ulp apart"
        return (
            f"{self.count} of {self.total} elements differ, first at {list(self.index or ())}: "
            f"{self.left} and {self.right}, {apart}"
        )


@dataclass(frozen=True)
class Attestation:
    """The result of comparing one engine with the order that it should keep."""

    dtype: str
    engine: str
    kept: bool
    checks: int
    detail: str


@dataclass(frozen=True)
class Fingerprint:
    """The machine and the software that numbers come from."""

    cpu: str
    capability: str
    cores: int
    threads: int
    python: str
    torch: str
    onednn: bool
    flags: str
    order_version: int


@dataclass(frozen=True)
class Provenance:
    """The origin of a page or record: software, machine, command, time, and a digest of what was judged."""

    isobit: str
    torch: str
    python: str
    cpu: str
    engine: str
    command: str
    date: str
    digest: str


@dataclass(frozen=True)
class Proof:
    """What an engine proved: for how many cases, covering what; `failure` is a counter-example."""

    engine: str
    covers: str
    cases: int
    failure: str = ""

    @property
    def kept(self) -> bool:
        """Whether something was proved and there is no counter-example."""
        return self.cases > 0 and not self.failure


@dataclass(frozen=True)
class Planted:
    """A wrong subject under a claim, and whether the claim caught it."""

    name: str
    caught: bool
    detail: str


@dataclass(frozen=True)
class ClaimRecord:
    """The result of one claim: kept, broken, void, vacuous, unbound, waived or could-not-run.

    `at` is the level of the counter-example, or 0. `drawn` is the number of `inputs` that L3 drew. `level` and
    `required` are not stored in evidence: the ladder computes them. Nor is `if_fails`, what a broken claim's contract
    says of likely causes.
    """

    claim: str
    relation: str
    verdict: str
    level: int
    required: int
    cases: int = 0
    inputs: int = 0
    compared: int = 0
    differing: int = 0
    detail: str = ""
    replay: str = ""
    planted: tuple[Planted, ...] = ()
    proof: Proof | None = None
    seconds: float = 0.0
    drawn: int = 0
    at: int = 0
    if_fails: str = ""


@dataclass(frozen=True)
class Shipped:
    """The status of a contract by the evidence in isobit's wheel, and the machine that made it."""

    verdict: str
    level: int
    cpu: str
    engine: str
    commit: str
    date: str
    torch: str
    python: str
    signed_by: str = ""  # the public key, in hexadecimal


@dataclass(frozen=True)
class ContractStatus:
    """The status of one contract by its evidence: a claim's verdict, not-judged or below-level."""

    id: str
    version: str
    title: str
    path: str
    digest: str
    verdict: str
    level: int
    required: int
    depends_on: tuple[str, ...] = ()
    obligations: int = 0
    claims: tuple[ClaimRecord, ...] = ()
    detail: str = ""
    subject: str = ""
    weak: str = ""  # a dependency that is not kept
    shipped: Shipped | None = None  # of a contract that was not judged here


@dataclass(frozen=True)
class Section:
    """A section of a contract in words; `kind` is about, equation, obligation, claim, inputs or waiver."""

    title: str
    lines: tuple[str, ...] = ()
    kind: str = ""
    name: str = ""


def to_json(value: Any) -> str:
    """Return a record, or a container of records, as JSON."""
    return plain_json(json.dumps(value, default=_plain, indent=2, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return plain | ({"kept": value.kept} if isinstance(value, Proof) else {})
    raise TypeError(f"no JSON form for {type(value).__name__}")
