"""Derive from a contract what a backend can be held to: claims that apply, small cases, wrong Triton kernels.

[Note: a contract on a backend]
The claims of a contract are about an operator, not about an executor. A backend (`isobit.certifying.executing`) runs
the same calls by the Triton executor, and the same relations and predicates judge the results. Four things differ:

- What has no meaning there is left out by name, with a reason, and counted apart: thread counts, partial sums, packed
  weights, ranks, and refusals, which the same Python makes before an executor is chosen.
- Cases are few and small, because the interpreter takes seconds for what a GPU does in microseconds: one size per
  axis, at most 17 rows and 23 of any other axis unless a plan names others, and all dtypes unless a plan names some.
  Claims are judged up to L2: 10,000 drawn inputs (L3) would take days, and proofs (L4) are of the CPU's code. The
  check of the operator's schema (L1) is of the CPU's operator.
- A planted wrong subject that does not run the operator has a twin: the operator itself, with a wrong Triton kernel.
- Evidence has a digest of its own, which covers the sources of the Triton executors, of the backend and of the twins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from isobit.contracts.language.contract import Claim, Contract, Inputs, planted_names
from isobit.library.on_gpu.plans import (
    COSTLY,
    ELSEWHERE,
    PLANS,
    PLANTS_LEFT_OUT,
    REFUSALS,
    ROWS,
    THREADS,
    WIDTH,
    Plan,
)
from isobit.library.on_gpu.twin_names import BY_CONTRACT, TWINS

LEVEL = "L2"


@dataclass(frozen=True)
class LeftOut:
    """A claim, or one transform or planted subject of a claim, that has no meaning on a backend."""

    contract: str
    what: str
    reason: str


@dataclass(frozen=True)
class Derived:
    """A contract as a backend is held to it, what was left out, and how many cases of the CPU's were kept.

    `contract` is None if no claim applies.
    """

    contract: Contract | None
    claims_left_out: tuple[LeftOut, ...]
    parts_left_out: tuple[LeftOut, ...]
    cases: int = 0
    cases_on_cpu: int = 0


def derive(contract: Contract) -> Derived:
    """Return what a backend is held to."""
    plan = PLANS.get(contract.id)
    if plan is None:
        reason = ELSEWHERE.get(contract.id, "no plan for backends names it")
        every = tuple(LeftOut(contract.id, claim.id, reason) for claim in contract.claims)
        return Derived(None, every, ())
    claims, claims_left, parts_left = [], [], []
    for claim in contract.claims:
        reason = reason_against(claim, plan)
        if reason:
            claims_left.append(LeftOut(contract.id, claim.id, reason))
            continue
        kept, left = derive_claim(contract.id, claim, plan)
        claims.append(kept)
        parts_left += [LeftOut(contract.id, f"{claim.id}: {what}", why) for what, why in left]
    parts_left += dtypes_left_out(contract, plan)
    linked = {name for claim in claims for name in claim.obligations}
    made = replace(
        contract,
        subjects={},
        depends_on=(),
        obligations=tuple(o for o in contract.obligations if o.id in linked),
        inputs={
            name: reduced(i, plan.sizes.get(name, {}), plan, plan.dtypes.get(name, i.dtypes))
            for name, i in contract.inputs.items()
        },
        claims=tuple(claims),
        waivers=(),
        operator="",
    )
    fixed = (count_cases(claims, contract.inputs), count_cases(claims, made.inputs))
    return Derived(made, tuple(claims_left), tuple(parts_left), fixed[1], fixed[0])


def reason_against(claim: Claim, plan: Plan) -> str:
    """Return why a claim does not apply to a backend; "" if it does."""
    if claim.id in plan.left_out:
        return plan.left_out[claim.id]
    if claim.relation == "refuses" or str(claim.params.get("predicate", "")).endswith(":refuses"):
        return REFUSALS
    if claim.params.get("under") == ("threads",):
        return THREADS
    return ""


def derive_claim(contract: str, claim: Claim, plan: Plan) -> tuple[Claim, list[tuple[str, str]]]:
    """Return a claim for backends, and which of its transforms and planted subjects were left out, with reasons."""
    left: list[tuple[str, str]] = []
    params = dict(claim.params)
    if "threads" in params.get("under", ()):
        params["under"] = tuple(name for name in params["under"] if name != "threads")
        left.append(("under threads", THREADS))
    if claim.id in plan.predicates:
        params["predicate"], reason = plan.predicates[claim.id]
        left.append(("part of the predicate", reason))
    if claim.proof is not None:
        left.append((f"proof by {claim.proof.engine}", "proofs are of the CPU's code"))
    kept = replace(claim, level=LEVEL, proof=None, params=params, inputs=kept_inputs(claim, plan))
    gone = [name for name in (*claim.sabotage, *claim.control) if name in PLANTS_LEFT_OUT]
    left += [(name, PLANTS_LEFT_OUT[name]) for name in gone]
    known = {**TWINS, **BY_CONTRACT.get(contract, {})}
    sabotage, control = (
        tuple(dict.fromkeys(known.get(name, name) for name in names if name not in gone))
        for names in (claim.sabotage, claim.control)
    )
    return replace(kept, sabotage=sabotage, control=control), left


def kept_inputs(claim: Claim, plan: Plan) -> tuple[str, ...]:
    """Return the inputs of a claim without those that take too long, in the order of the plan."""
    kept = [name for name in claim.inputs if name not in plan.inputs_left_out]
    kept.sort(key=lambda name: name not in plan.tried_first)
    return tuple(kept) or claim.inputs[:1]


def dtypes_left_out(contract: Contract, plan: Plan) -> list[LeftOut]:
    """Return which dtypes of which inputs are left out."""
    return [
        LeftOut(contract.id, f"inputs {name} in {dtype}", COSTLY)
        for name, kept in plan.dtypes.items()
        for dtype in contract.inputs[name].dtypes
        if dtype not in kept
    ]


def reduced(
    inputs: Inputs, sizes: Mapping[str, tuple[int, ...]], plan: Plan, dtypes: tuple[str, ...]
) -> Inputs:
    """Return inputs of one small size per axis, or of the sizes given, with one edge pattern."""
    chosen = {
        name: sizes.get(name) or (nearest(values, ROWS if name == inputs.rows else WIDTH),)
        for name, values in inputs.sizes.items()
    }
    edges = tuple(edge for edge in inputs.edges if edge in plan.edges)
    return replace(inputs, sizes=chosen, edges=edges, dtypes=dtypes, thorough={})


def nearest(values: tuple[int, ...], limit: int) -> int:
    """Return the limit if the contract has larger sizes, else its largest size."""
    return min(max(values), limit)


def count_cases(claims: list[Claim], inputs: Mapping[str, Inputs]) -> int:
    """Return how many fixed cases L2 judges: every size with every dtype, and every edge pattern."""
    total = 0
    for name in (name for claim in claims for name in claim.inputs):
        grids = 1
        for values in inputs[name].sizes.values():
            grids *= len(values)
        total += (grids + len(inputs[name].edges)) * len(inputs[name].dtypes)
    return total


def planted_in(contract: Contract) -> tuple[tuple[str, str], ...]:
    """Return (claim, name) of every wrong subject that a contract plants."""
    return tuple((claim.id, name) for claim in contract.claims for name in planted_names(claim))
