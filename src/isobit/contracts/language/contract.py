"""The records of a contract: equations, obligations, inputs, claims and waivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Params = Mapping[str, Any]
# What judges compiled code: certifies a function, and plants a fault in it.
CERTIFY = "isobit.certifying.api:certify"
PLANT = "isobit.certifying.judging.planted:one_more_product"


@dataclass(frozen=True)
class Equation:
    """What is computed, on which domain, with which codomain."""

    formula: str
    domain: str = ""
    codomain: str = ""


@dataclass(frozen=True)
class Obligation:
    """A promise in words; claims make it executable."""

    id: str
    text: str
    equation: str = ""
    line: int = 0


@dataclass(frozen=True)
class Inputs:
    """What the inputs of a claim are drawn from."""

    arguments: Params
    sizes: Mapping[str, tuple[int, ...]]
    dtypes: tuple[str, ...] = ("float32",)
    values: str = "normal"
    edges: tuple[str, ...] = ()
    rows: str = ""
    options: Params = field(default_factory=dict)
    thorough: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ProofPlan:
    """How a claim is proved: the engine, the function that runs it, and a wrong subject that must fail."""

    engine: str
    planted: str
    by: str = ""
    inputs: str = ""


@dataclass(frozen=True)
class Claim:
    """One executable promise: a relation, its inputs, the level it must reach, and its sabotage."""

    id: str
    obligations: tuple[str, ...]
    relation: str
    level: str
    text: str = ""
    inputs: tuple[str, ...] = ()
    sabotage: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    if_fails: str = ""  # likely causes, and what to look at first
    proof: ProofPlan | None = None
    params: Params = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True)
class Waiver:
    """A claim that need not be kept for now: why, whose decision, until when."""

    claim: str
    reason: str
    owner: str
    expires: str
    line: int = 0


@dataclass(frozen=True)
class Contract:
    """A contract file: obligations and the claims that make them executable."""

    id: str
    version: str
    title: str
    obligations: tuple[Obligation, ...]
    subject: str = ""
    subjects: Mapping[str, str] = field(default_factory=dict)
    depends_on: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    equations: Mapping[str, Equation] = field(default_factory=dict)
    inputs: Mapping[str, Inputs] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    operator: str = ""
    output: tuple[str | int, ...] = ()
    call: str = (
        ""  # (subject, *arguments) -> output, if the subject takes other arguments than are drawn
    )
    path: str = ""  # the file; empty if the text was not read from one

    def code(self) -> tuple[str, ...]:
        """Return every `package:function` that the contract names, each once; with what judges compiled code."""
        found = [self.subject, self.call, *self.subjects.values()]
        for claim in self.claims:
            found += [CERTIFY, PLANT] if claim.relation == "certified" else []
            found += [
                *claim.sabotage,
                *claim.control,
                *((claim.proof.by, claim.proof.planted) if claim.proof else ()),
            ]
            for value in claim.params.values():
                found += [
                    v
                    for v in (value if isinstance(value, tuple) else (value,))
                    if isinstance(v, str)
                ]
        return tuple(dict.fromkeys(ref for ref in found if ":" in ref))
