"""Judge L4: run the proof engine that a claim names on the subject, and on a wrong subject that must fail."""

from __future__ import annotations

from dataclasses import replace

import torch

from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.cases import domain_of
from isobit.contracts.judge.recipes import Case, Recipe
from isobit.contracts.judge.relations import RELATIONS, prove_compiled
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Inputs
from isobit.errors import ContractError, EngineError, RevealError, in_one_line
from isobit.foundation.records import Planted, Proof

PATTERNS = 2**16


def prove(bound: Bound) -> tuple[Proof, Planted]:
    """Run the proof on the subject and on the planted wrong one, for which it must fail."""
    plan = bound.claim.proof
    assert plan is not None
    proof = run_proof(bound)
    if not proof.kept:
        return proof, Planted(plan.planted, False, "not tried")
    planted = bound.plant(plan.planted)
    try:
        wrong = run_proof(planted)
    except RevealError as error:  # it has no order
        return proof, Planted(
            f"proof: {plan.planted}", True, f"rejected: {in_one_line(error)[:200]}"
        )
    except Exception as error:  # an error of the planted subject catches nothing
        return proof, Planted(
            f"proof: {plan.planted}",
            False,
            f"raised {type(error).__name__}: {in_one_line(error)[:200]}",
        )
    return proof, Planted(f"proof: {plan.planted}", not wrong.kept, wrong.failure)


def run_proof(bound: Bound) -> Proof:
    """Run the proof engine that the claim names."""
    plan = bound.claim.proof
    assert plan is not None
    if plan.by:
        found = bound.code[plan.by](bound.wrap(bound.subject))
        if not isinstance(found, Proof):
            raise ContractError(
                expected=f"{plan.by} to return isobit.foundation.records.Proof",
                received=type(found).__name__,
                remedy="return Proof(engine, covers, cases, failure)",
            )
        return found
    if plan.engine == "compiled":
        return prove_compiled(bound)
    if plan.engine == "z3":
        return prove_integers(bound)
    return enumerate_values(bound, plan.inputs, bound.contract.inputs[plan.inputs])


def prove_integers(bound: Bound) -> Proof:
    """Prove the predicate for all integers of the domain, along every path of the subject."""
    from isobit.contracts.judge.proofs import integers

    def predicate(**given: object) -> object:
        return bound.named("predicate")(bound.wrap(bound.subject), **given)

    domain = domain_of(bound)
    found = integers.prove(predicate, domain)
    if found.unknown:
        raise EngineError(
            expected="z3 to decide the claim",
            received=found.unknown,
            remedy="state it with fewer products",
        )
    failure = "" if found.proved else f"false at {found.counterexample}"
    limits = ", ".join(said_limit(name, *pair) for name, pair in domain.items())
    return Proof(
        "z3 on the integers",
        f"all integers {limits}; every path of the function",
        found.paths,
        failure,
    )


def said_limit(name: str, low: int | None, high: int | None) -> str:
    """Write the range of an integer."""
    if low is None and high is None:
        return name
    return f"{name} in [{'−∞' if low is None else low}, {'∞' if high is None else high}]"


def enumerate_values(bound: Bound, name: str, inputs: Inputs) -> Proof:
    """Judge the relation on every bit pattern of each 16-bit dtype, through the real kernel."""
    wide = [name for name in inputs.dtypes if name not in ("bfloat16", "float16")]
    if wide:
        raise ContractError(
            expected="16-bit dtypes for enumeration",
            received=", ".join(wide),
            remedy="list bfloat16, float16",
        )
    tally, cases = Tally(), 0
    first = next(iter(inputs.arguments))
    for dtype in inputs.dtypes:
        sizes = tuple((n, PATTERNS if n == inputs.rows else 1) for n in inputs.sizes)
        case = Case(Recipe(name, dtype, sizes, inputs.values), inputs)
        values = torch.arange(PATTERNS, dtype=torch.int32).to(torch.int16).view(case.dtype)
        values = values if {"nans", "infinities"} & set(inputs.edges) else values[values.isfinite()]
        sizes = tuple((n, len(values) if n == inputs.rows else v) for n, v in sizes)
        case = Case(replace(case.recipe, sizes=sizes), inputs)
        case.__dict__["arguments"] = {**case.arguments, first: values.reshape(case.shape_of(first))}
        with torch.no_grad():
            RELATIONS[bound.claim.relation](bound, case, tally)
        cases += case.rows
    finite = "" if "nans" in inputs.edges else "finite "
    covers = f"every {finite}value of {' and '.join(inputs.dtypes)}, one at a time (every size but the rows is 1)"
    return Proof(
        "enumeration of the real kernel", covers, cases if tally.compared else 0, tally.first
    )
