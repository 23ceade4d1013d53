"""Judge a contract: each claim at L1 to L4, until the level that it must reach or the first that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from isobit import bits
from isobit.contracts.judge.bound import Bound, bind, subject_name
from isobit.contracts.judge.cases import (
    Progress,
    check_device,
    domain_of,
    examine,
    failure_fields,
    find_breach,
    shrink,
    unseen,
)
from isobit.contracts.judge.recipes import Case, Recipe, fixed_recipes
from isobit.contracts.judge.relations import RELATIONS, prove_compiled
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Contract, Inputs, default_sabotage, for_transform
from isobit.contracts.options import Options
from isobit.contracts.store import ladder
from isobit.contracts.store.ladder import level_number, with_causes
from isobit.errors import ContractError, EngineError, IsobitError, RevealError, in_one_line
from isobit.foundation import native
from isobit.foundation.records import ClaimRecord, Planted, Proof

# Judge L1: the operator's schema, and the shape and dtype of outputs.

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


def check(bound: Bound) -> Tally:
    """Check the shapes and dtypes of outputs, that inputs are not written to, and the operator itself.

    All claims of the contract share this; of `bound`, only the contract and the subject are used.
    """
    contract, tally = bound.contract, Tally()
    used = {name for claim in contract.claims for name in claim.inputs}
    for name, inputs in contract.inputs.items():
        if name not in used:
            continue
        declared = bool(contract.output) and {
            a for a in contract.output if isinstance(a, str)
        } <= set(inputs.sizes)
        for recipe in (
            fixed_recipes(name, inputs) if declared else [next(fixed_recipes(name, inputs))]
        ):
            case = Case(recipe, inputs)
            if sum(t.numel() for t in case.arguments.values()) > 2**20:
                continue
            tally.count(case.rows)
            expected = (
                [case.sizes[a] if isinstance(a, str) else int(a) for a in contract.output]
                if declared
                else None
            )
            check_output(bound.subject, case, expected, tally, bool(contract.operator))
    is_own = not bound.options.subject  # another subject is not that operator
    if contract.operator and is_own and not tally.differing:
        check_operator(contract, tally)
    return tally


def check_output(
    subject: Callable[..., Any],
    case: Case,
    expected: list[int] | None,
    tally: Tally,
    without_data: bool,
) -> None:
    """Call once with real tensors and, for registered operators, once with meta tensors."""
    calls = {"output": case.arguments}
    if without_data:
        calls["output without data"] = {name: t.to("meta") for name, t in case.arguments.items()}
    for what, arguments in calls.items():
        tally.compared += 1
        before = [t.clone() for t in arguments.values()]
        try:
            found = subject(*arguments.values(), **case.options)
        except (Exception, SystemExit) as error:
            check_device(error)
            tally.fail(
                f"{what} at {case.recipe}: raised {type(error).__name__}: {in_one_line(error)[:200]}"
            )
            return
        if expected is not None and (list(found.shape) != expected or found.dtype != case.dtype):
            tally.fail(
                f"{what} at {case.recipe}: {list(found.shape)} {found.dtype}, expected {expected} {case.dtype}"
            )
        same = all(
            bits.equal(a, b)
            for a, b in zip(before, arguments.values(), strict=True)
            if a.device.type != "meta"
        )
        if not same:
            tally.fail(
                f"{what} at {case.recipe}: the subject writes to its inputs, so that nothing can be compared"
            )


def check_operator(contract: Contract, tally: Tally) -> None:
    """Run torch.library.opcheck on the smallest case of each of the contract's inputs."""
    namespace, _, name = contract.operator.partition("::")
    native.load()  # kernels are loaded by the first call, and all cases may have been too large for one
    try:
        operator = getattr(getattr(torch.ops, namespace), name).default
    except AttributeError as error:
        raise EngineError(
            expected=f"the operator {contract.operator}",
            received=in_one_line(error),
            remedy="run isobit doctor for the reason",
        ) from None
    schema = {argument.name: argument.default_value for argument in operator._schema.arguments}
    fitting = {
        name: inputs
        for name, inputs in contract.inputs.items()
        if set(inputs.arguments) <= set(schema)
    }
    if not fitting:
        tally.fail(
            f"opcheck of {contract.operator}: no inputs have its arguments, {', '.join(schema)}"
        )
    for inputs_name, inputs in fitting.items():
        case = Case(next(fixed_recipes(inputs_name, inputs)), inputs)
        tally.compared += len(TESTS)
        try:
            torch.library.opcheck(
                operator, tuple({**schema, **case.arguments}.values()), test_utils=TESTS
            )
        except Exception as error:
            tally.fail(
                f"opcheck of {contract.operator}: {type(error).__name__}: {in_one_line(error)[:300]}"
            )


# Judge a claim on its planted wrong subjects and controls: each must be caught.


def try_planted(bound: Bound) -> Iterator[Planted]:
    """Judge the claim's fixed inputs on each wrong subject and each control."""
    for label, judged, name in wrong_subjects(bound):
        if name:
            yield try_one(judged.plant(name), label)
        else:
            yield Planted(label, False, "there is no built-in sabotage for it: name its sabotage")


def wrong_subjects(bound: Bound) -> Iterator[tuple[str, Bound, str]]:
    """Yield a label, the claim as it is judged, and the wrong subject; no name if a transform has none."""
    claim = bound.claim
    if claim.relation != "invariant" or claim.sabotage:
        for name in claim.sabotage or default_sabotage(claim.relation, claim.params):
            yield name, bound, name
    else:
        # Each transform must catch by itself what is planted for it.
        for transform in claim.params["under"]:
            params = {**claim.params, "under": (transform,)}
            alone = replace(bound, claim=replace(claim, params=params))
            names = for_transform(transform, claim.params)
            if not names:
                yield transform, alone, ""
            for name in names:
                yield f"{name}, under {transform}", alone, name
    for name in claim.control:
        yield f"control {name}", bound, name


def try_one(bound: Bound, name: str) -> Planted:
    """Judge one wrong subject. A difference catches it; an exception does not."""
    try:
        tally, _ = examine(bound, first_only=True)
    except (Exception, SystemExit) as error:
        return Planted(name, False, f"raised {type(error).__name__}: {in_one_line(error)[:200]}")
    if not tally.differing and bound.claim.relation == "algebra" and bound.claim.proof is not None:
        # A solver finds integers that are rare to draw.
        wrong = run_proof(bound)
        return Planted(name, not wrong.kept, wrong.failure)
    return Planted(
        name, tally.differing > 0, tally.first or f"{tally.compared:,} compared, none differ"
    )


# Judge a claim at L3, on many drawn inputs, and at L4, by proof.


def judge_higher_levels(bound: Bound, tally: Tally, record: ClaimRecord) -> ClaimRecord:
    """Judge L3 and then L4; `record` and `tally` are those of L2, which the claim has reached."""
    if bound.claim.relation not in ladder.NOT_DRAWN:
        record = judge_drawn_inputs(bound, tally, record)
        if record.level < 3:
            return record
    if bound.claim.proof is None or bound.options.level < 4:
        return record
    return judge_proof(bound, record)


def judge_drawn_inputs(bound: Bound, tally: Tally, record: ClaimRecord) -> ClaimRecord:
    """Judge L3: draw inputs until there are enough, or until one breaks the claim."""
    drawn = Tally()  # counted apart from the inputs that L2 listed
    failing = find_breach(bound, drawn)
    tally.add(drawn)
    record = replace(record, drawn=drawn.inputs, **tally.counts())
    if failing is not None:
        if isinstance(failing, Recipe):
            failing = shrink(bound, failing)
        found = failure_fields(bound, tally, failing)
        return replace(record, verdict="broken", level=1, at=3, **tally.counts(), **found)
    if drawn.inputs >= ladder.ENOUGH_INPUTS:
        return replace(record, level=3)
    seconds = f"{bound.options.claim_seconds:.0f} s"
    return replace(
        record,
        detail=f"{drawn.inputs:,} inputs in {seconds}; L3 requires {ladder.ENOUGH_INPUTS:,}",
    )


def judge_proof(bound: Bound, record: ClaimRecord) -> ClaimRecord:
    """Judge L4: the proof must hold for the subject and fail for the planted one."""
    proof, planted = prove(bound)
    record = replace(record, proof=proof)
    if not proof.kept:
        verdict, at = ("broken", 4) if proof.cases else ("could-not-run", 0)
        return replace(record, verdict=verdict, level=1, at=at, detail=proof.failure)
    record = replace(record, planted=(*record.planted, planted))
    if not planted.caught:
        detail = f"the proof holds for a wrong subject: {planted.name}"
        return replace(record, verdict="void", level=1, detail=detail)
    return replace(record, level=4)


# Judge L4: run the proof engine that a claim names on the subject, and on a wrong subject that must fail.

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


NOT_REACHED = "not reached in the time given by --seconds"


def verify_contract(
    contract: Contract,
    options: Options,
    deadline: float = float("inf"),
    progress: Progress = unseen,
) -> Iterator[ClaimRecord]:
    """Judge each claim and yield its record.

    An exception inside a claim becomes that claim's verdict. No claim is started after `deadline`
    (of `time.monotonic()`). `progress` is called for each case and each planted subject of L2.
    """
    checks: Tally | None = None  # of L1, which all claims share
    for claim in contract.claims:
        started = time.monotonic()
        empty = ClaimRecord(claim.id, claim.relation, "could-not-run", 0, level_number(claim.level))
        try:
            if started > deadline:
                record = replace(empty, detail=NOT_REACHED)
            elif not subject_name(contract, options):
                record = replace(empty, verdict="unbound", detail="the contract names no subject")
            else:
                bound = bind(contract, claim, options)
                checks = checks or check(bound)
                record = judge_claim(bound, empty, checks, progress)
        except IsobitError as error:
            record = replace(empty, detail=in_one_line(error))
        except (Exception, SystemExit) as error:  # in a predicate, a proof or an import
            message = in_one_line(error)[:300]
            record = replace(empty, detail=f"raised {type(error).__name__}: {message}")
        yield with_causes(contract, replace(record, seconds=round(time.monotonic() - started, 3)))


def judge_claim(
    bound: Bound, empty: ClaimRecord, checks: Tally, progress: Progress = unseen
) -> ClaimRecord:
    """Judge one claim level by level, until the level that it must reach or the first that fails."""
    required = min(level_number(bound.claim.level), bound.options.level)
    if checks.differing:
        record = replace(empty, verdict="broken", at=1, detail=checks.first)
        return replace(record, compared=checks.compared, differing=checks.differing)
    if required < 2:
        return replace(empty, verdict="kept", level=1, compared=checks.compared, cases=checks.cases)
    record, tally = judge_fixed_inputs(bound, empty, progress)
    if record.verdict != "kept" or required == 2:
        return record
    return judge_higher_levels(bound, tally, record)


def judge_fixed_inputs(
    bound: Bound, empty: ClaimRecord, progress: Progress = unseen
) -> tuple[ClaimRecord, Tally]:
    """Judge L2: the listed inputs, and every planted wrong subject."""
    tally, failing = examine(bound, progress=progress)
    record = replace(empty, level=1, **tally.counts())
    if tally.differing:
        progress(f"{bound.claim.id}: looking for a smaller case", 0, 1)
        smallest = shrink(bound, failing)
        found = failure_fields(bound, tally, smallest)
        return replace(record, verdict="broken", at=2, **found), tally
    idle = [name for name in bound.claim.params.get("under", ()) if not tally.shares.get(name)]
    if not tally.compared or not tally.cases or idle:
        detail = f"nothing was compared under {idle[0]}" if idle else "nothing was compared"
        return replace(record, verdict="vacuous", detail=detail), tally
    planted = []
    for one in try_planted(bound):
        planted.append(one)
        progress(f"{bound.claim.id}, planted {one.name}", len(planted), len(planted))
    record = replace(record, planted=tuple(planted))
    missed = [p for p in planted if not p.caught]
    if missed or not planted:
        detail = "there is no built-in sabotage for it"
        if missed:
            detail = f"not caught: {missed[0].name} ({missed[0].detail})"
        return replace(record, verdict="void", detail=detail), tally
    return replace(record, verdict="kept", level=2), tally
