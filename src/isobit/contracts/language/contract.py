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


# Names of the built-in wrong subjects, and which are planted for each transform and relation.

LIBRARY_NAMES = (
    "order by batch",
    "last row off by one ulp",
    "leak from the row before",
    "other kernel for other storage",
    "sum shared among threads",
    "other kernel for more axes",
    "one ulp off",
    "stale cache",
    "stale weights",
    "constant output",
    "identity",
    "wrong divisor",
    "narrow accumulator",
    "axes swapped",
    "off by one at the tail",
    "negated",
    "three times too large",
    "accepts everything",
    "never launched",
    "made for one size",
    "loaded at each call",
    "one more product elsewhere",
    "order by batch with gradients",
    "constant output with gradients",
)
TRAINING = "with gradients"  # ends the names of subjects that are wrong only with gradients enabled

BY_TRANSFORM = {
    "batch": ("order by batch", "last row off by one ulp", "order by batch with gradients"),
    "position": ("last row off by one ulp", "leak from the row before"),
    "neighbours": ("leak from the row before",),
    "padding": ("last row off by one ulp", "leak from the row before"),
    "chunking": ("last row off by one ulp",),
    "packing": ("other kernel for more axes",),
    "cache": ("stale cache", "stale weights"),
    "layout": ("other kernel for other storage",),
    "threads": ("sum shared among threads",),
}
BY_RELATION = {
    "accurate": (
        "constant output",
        "wrong divisor",
        "narrow accumulator",
        "axes swapped",
        "off by one at the tail",
        "constant output with gradients",
    ),
    "gradient": ("constant output", "wrong divisor", "narrow accumulator", "axes swapped"),
    "parity": ("one ulp off", "constant output", "identity", "constant output with gradients"),
    "sums_to": ("constant output", "wrong divisor", "identity"),
    "monotone": ("negated",),
    "roundtrip": ("one ulp off", "constant output"),
    "refuses": ("accepts everything",),
    "certified": ("one more product elsewhere",),
    "launches": ("never launched", "made for one size", "loaded at each call"),
}


def default_sabotage(relation: str, params: Any) -> tuple[str, ...]:
    """Return what is planted for a claim that names no sabotage."""
    if relation == "invariant":
        return tuple(
            dict.fromkeys(s for name in params["under"] for s in for_transform(name, params))
        )
    if relation == "bound":
        return ("negated",) * ("low" in params) + ("three times too large",) * ("high" in params)
    return fitting(BY_RELATION.get(relation, ()), params)


def for_transform(transform: str, params: Any) -> tuple[str, ...]:
    """Return what is planted for one transform of a claim."""
    return fitting(BY_TRANSFORM.get(transform, ()), params)


def fitting(names: tuple[str, ...], params: Any) -> tuple[str, ...]:
    """Return those names that a claim on an output, or on a gradient, can catch."""
    is_output = params.get("of", "output") == "output"
    return tuple(name for name in names if is_output or not name.endswith(TRAINING))


def planted_names(claim: Claim) -> tuple[str, ...]:
    """Return the names under which L2 records each wrong subject of a claim."""
    if claim.relation != "invariant" or claim.sabotage:
        names = claim.sabotage or default_sabotage(claim.relation, claim.params)
    else:
        under = claim.params["under"]
        nothing = ("nothing is planted",)
        names = tuple(
            f"{n}, under {t}" for t in under for n in for_transform(t, claim.params) or nothing
        )
    return (*names, *(f"control {name}" for name in claim.control))


def has_default(relation: str) -> bool:
    """Return whether something is planted for a claim that names no sabotage."""
    return relation in ("invariant", "bound") or relation in BY_RELATION
