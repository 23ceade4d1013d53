"""Judges a contract: every claim on its inputs, on its sabotage, on many more inputs, and by proof, as far as asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from isobit.contracts.judge import construction, proving
from isobit.contracts.judge.cases import examine, find_breach, run_both, shrink
from isobit.contracts.judge.integers_search import examine_integers
from isobit.contracts.judge.recipes import Recipe
from isobit.contracts.judge.relations import Bound
from isobit.contracts.judge.sabotage import LIBRARY
from isobit.contracts.judge.sabotage_names import default_sabotage, for_transform
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.trust import resolve
from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.store import ladder
from isobit.contracts.store.sources import is_interpreted
from isobit.errors import ContractError, IsobitError, in_one_line
from isobit.records import ClaimRecord, Planted

SECONDS_A_CLAIM = 120.0


@dataclass(frozen=True)
class Options:
    """How far to go, and whom to trust."""

    trusted: tuple[str, ...] = ()
    level: int = 4
    thorough: bool = False
    subject: str = ""
    deadline: float = float("inf")
    seconds: float = SECONDS_A_CLAIM
    file: str = ""  # of the contract, where it is not one of the library's


def verify_contract(contract: Contract, options: Options) -> Iterator[ClaimRecord]:
    """A record per claim, as each is reached; whatever happens inside a claim is its verdict, not an exception."""
    constructed: Tally | None = None
    for claim in contract.claims:
        started = time.monotonic()
        empty = ClaimRecord(
            claim.id, claim.relation, "could-not-run", 0, ladder.level_number(claim.level)
        )
        try:
            if started > options.deadline:
                record = replace(empty, detail="not reached in the time given by --seconds")
            elif not subject_name(contract, options):
                record = replace(empty, verdict="unbound", detail="the contract names no subject")
            else:
                if constructed is None:
                    constructed = construction.check(
                        contract, subject_of(contract, options), not options.subject
                    )
                record = judge(contract, claim, options, empty, constructed)
        except IsobitError as error:
            record = replace(empty, detail=in_one_line(error))
        except (
            Exception,
            SystemExit,
        ) as error:  # a predicate, a proof or an import of somebody's code
            record = replace(
                empty, detail=f"raised {type(error).__name__}: {in_one_line(error)[:300]}"
            )
        yield replace(record, seconds=round(time.monotonic() - started, 3))


def subject_name(contract: Contract, options: Options) -> str:
    """The code that is judged: the contract's own, or another that it or the caller names."""
    chosen = options.subject
    return (
        contract.subjects.get(chosen, chosen if ":" in chosen else "")
        if chosen
        else contract.subject
    )


def subject_of(contract: Contract, options: Options) -> Callable[..., Any]:
    """Found and callable."""
    found = resolve(subject_name(contract, options), options.trusted)
    if not callable(found):
        raise ContractError(
            expected="a subject that can be called",
            received=f"{subject_name(contract, options)}, a {type(found).__name__}",
            remedy="name a function",
        )
    return found  # type: ignore[no-any-return]


def bind(contract: Contract, claim: Claim, options: Options) -> Bound:
    """A claim with its code found."""
    named = [
        v
        for value in claim.params.values()
        for v in (value if isinstance(value, tuple) else (value,))
    ]
    named.append(claim.proof.by if claim.proof else "")
    code = {
        ref: resolve(ref, options.trusted) for ref in named if isinstance(ref, str) and ":" in ref
    }
    return Bound(claim, subject_of(contract, options), code)


def judge(
    contract: Contract, claim: Claim, options: Options, empty: ClaimRecord, built: Tally
) -> ClaimRecord:
    """Up the ladder until the level asked for, or until a rung does not hold."""
    bound, wanted = (
        bind(contract, claim, options),
        min(ladder.level_number(claim.level), options.level),
    )
    if built.differing:
        found = replace(empty, verdict="broken", at=1, detail=built.first)
        return replace(found, compared=built.compared, differing=built.differing)
    if wanted < 2:
        return replace(empty, verdict="kept", level=1, compared=built.compared, cases=built.cases)
    tally, failing = examine(contract, bound, options.thorough)
    record = replace(empty, level=1, **counts(tally))
    if tally.differing:
        smallest = shrink(contract, bound, failing)
        return replace(
            record, verdict="broken", at=2, **told(contract, claim, options, tally, smallest)
        )
    idle = [name for name in claim.params.get("under", ()) if not tally.shares.get(name)]
    if not tally.compared or not tally.cases or idle:
        detail = f"nothing was compared under {idle[0]}" if idle else "nothing was compared"
        return replace(record, verdict="vacuous", detail=detail)
    planted = tuple(try_planted(contract, bound, options))
    record = replace(record, planted=planted)
    missed = [p for p in planted if not p.caught]
    if missed or not planted:
        detail = (
            f"not caught: {missed[0].name} ({missed[0].detail})"
            if missed
            else "no sabotage is known for it"
        )
        return replace(record, verdict="void", detail=detail)
    record = replace(record, verdict="kept", level=2)
    return climb(contract, claim, bound, options, tally, record) if wanted > 2 else record


def climb(
    contract: Contract,
    claim: Claim,
    bound: Bound,
    options: Options,
    tally: Tally,
    record: ClaimRecord,
) -> ClaimRecord:
    """L3 and L4."""
    if claim.relation not in ("refuses", "launches"):
        drawn = Tally()  # L3 counts what it draws itself, beside what L2 listed
        failing = find_breach(contract, bound, drawn, options.seconds)
        tally.add(drawn)
        record = replace(record, drawn=drawn.inputs, **counts(tally))
        if failing is not None:
            if isinstance(failing, Recipe):
                failing = shrink(contract, bound, failing)
            found = told(contract, claim, options, tally, failing)
            return replace(record, verdict="broken", level=1, at=3, **counts(tally), **found)
        if drawn.inputs >= ladder.ENOUGH_INPUTS:
            record = replace(record, level=3)
        else:
            return replace(
                record,
                detail=f"{drawn.inputs:,} inputs in {options.seconds:.0f} s; L3 asks for 10,000",
            )
    if claim.proof is None or options.level < 4:
        return record
    proof, wrongly = proving.prove(contract, bound, partial(plant, options=options))
    record = replace(record, proof=proof)
    if not proof.kept:
        verdict, at = ("broken", 4) if proof.cases else ("could-not-run", 0)
        return replace(record, verdict=verdict, level=1, at=at, detail=proof.failure)
    record = replace(record, planted=(*record.planted, wrongly))
    if not wrongly.caught:
        return replace(
            record,
            verdict="void",
            level=1,
            detail=f"the proof holds for a wrong subject: {wrongly.name}",
        )
    return replace(record, level=4)


def counts(tally: Tally) -> dict[str, Any]:
    """As records hold them."""
    return {
        "cases": tally.cases,
        "inputs": tally.inputs,
        "compared": tally.compared,
        "differing": tally.differing,
    }


def told(
    contract: Contract, claim: Claim, options: Options, tally: Tally, smallest: Any
) -> dict[str, Any]:
    """The first difference on the smallest counter-example, and the command that shows it again.

    A search does not count the case that it fails on: where `tally` has no difference yet, that case is added.
    """
    detail = tally.first
    if isinstance(smallest, Recipe):
        again = Tally()
        run_both(contract, bind(contract, claim, options), smallest, again)
        detail = again.first or detail
        if not tally.differing:
            tally.add(again)
    elif smallest:
        detail = f"{smallest}"
    words = ["TRITON_INTERPRET=1"] if is_interpreted() else []
    words += ["isobit", "replay", f"{contract.id}/{claim.id}"]
    if smallest:
        words += ["--case", f"'{smallest}'"]
    if options.subject:
        words += ["--subject", options.subject]
    for package in options.trusted:
        words += ["--trust", package]
    if options.file:
        words += ["--file", options.file]
    return {"detail": detail, "replay": " ".join(words)}


def replay(contract: Contract, claim: Claim, options: Options, recipe: str) -> Tally:
    """One case again, or all fixed ones."""
    bound, tally = bind(contract, claim, options), Tally()
    if not recipe or claim.relation == "refuses":
        return examine(contract, bound, options.thorough)[0]
    if claim.relation == "algebra":
        examine_integers(bound, tally, recipe)
    else:
        run_both(contract, bound, Recipe.parse(recipe, contract.inputs), tally)
    return tally


# ---- sabotage -------------------------------------------------------------------------------------------


def plant(bound: Bound, name: str, options: Options) -> Bound:
    """The same claim on a wrong subject: the library's wrapper, or the code that is named."""
    if name in LIBRARY:
        return replace(bound, wrap=LIBRARY[name])
    if ":" not in name:
        raise ContractError(
            expected="a sabotage of the library, or package:function",
            received=name,
            remedy=f"use one of: {', '.join(LIBRARY)}",
        )
    return replace(bound, subject=resolve(name, options.trusted))


def try_planted(contract: Contract, bound: Bound, options: Options) -> Iterable[Planted]:
    """Each wrong subject, and each control, must break the claim on its fixed inputs."""
    claim = bound.claim
    if claim.relation != "invariant" or claim.sabotage:
        for name in claim.sabotage or default_sabotage(claim.relation, claim.params):
            yield try_one(contract, plant(bound, name, options), name, options)
    else:
        # Each transform must catch by itself what is planted for it.
        for transform in claim.params["under"]:
            alone = replace(
                bound, claim=replace(claim, params={**claim.params, "under": (transform,)})
            )
            names = for_transform(transform, claim.params)
            if not names:
                yield Planted(
                    transform, False, "the library plants nothing for it: name its sabotage"
                )
            for name in names:
                yield try_one(
                    contract, plant(alone, name, options), f"{name}, under {transform}", options
                )
    for name in claim.control:
        yield try_one(contract, plant(bound, name, options), f"control {name}", options)


def try_one(contract: Contract, bound: Bound, name: str, options: Options) -> Planted:
    """Caught by a difference; an exception is a fault of the plant, not a catch."""
    try:
        tally, _ = examine(contract, bound, options.thorough, first_only=True)
    except (Exception, SystemExit) as error:
        return Planted(name, False, f"raised {type(error).__name__}: {in_one_line(error)[:200]}")
    if not tally.differing and bound.claim.relation == "algebra" and bound.claim.proof is not None:
        wrong = proving.ask(contract, bound)  # integers that are rare to draw, a solver finds
        return Planted(name, not wrong.kept, wrong.failure)
    return Planted(
        name, tally.differing > 0, tally.first or f"{tally.compared:,} compared, none differ"
    )
