"""Judge a claim at L3, on many drawn inputs, and at L4, by proof."""

from __future__ import annotations

from dataclasses import replace

from isobit.contracts.judge import proving
from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.cases import find_breach, shrink
from isobit.contracts.judge.recipes import Recipe
from isobit.contracts.judge.replay import failure_fields
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Contract
from isobit.contracts.options import Options
from isobit.contracts.store import ladder
from isobit.foundation.records import ClaimRecord


def judge_higher_levels(
    contract: Contract, bound: Bound, options: Options, tally: Tally, record: ClaimRecord
) -> ClaimRecord:
    """Judge L3 and then L4; `record` and `tally` are those of L2, which the claim has reached."""
    if bound.claim.relation not in ladder.NOT_DRAWN:
        record = judge_drawn_inputs(contract, bound, options, tally, record)
        if record.level < 3:
            return record
    if bound.claim.proof is None or options.level < 4:
        return record
    return judge_proof(contract, bound, options, record)


def judge_drawn_inputs(
    contract: Contract, bound: Bound, options: Options, tally: Tally, record: ClaimRecord
) -> ClaimRecord:
    """Judge L3: draw inputs until there are enough, or until one breaks the claim."""
    drawn = Tally()  # counted apart from the inputs that L2 listed
    failing = find_breach(contract, bound, drawn, options.claim_seconds)
    tally.add(drawn)
    record = replace(record, drawn=drawn.inputs, **tally.counts())
    if failing is not None:
        if isinstance(failing, Recipe):
            failing = shrink(contract, bound, failing)
        found = failure_fields(contract, bound, options, tally, failing)
        return replace(record, verdict="broken", level=1, at=3, **tally.counts(), **found)
    if drawn.inputs >= ladder.ENOUGH_INPUTS:
        return replace(record, level=3)
    seconds = f"{options.claim_seconds:.0f} s"
    return replace(
        record,
        detail=f"{drawn.inputs:,} inputs in {seconds}; L3 requires {ladder.ENOUGH_INPUTS:,}",
    )


def judge_proof(
    contract: Contract, bound: Bound, options: Options, record: ClaimRecord
) -> ClaimRecord:
    """Judge L4: the proof must hold for the subject and fail for the planted one."""
    proof, planted = proving.prove(contract, bound, options)
    record = replace(record, proof=proof)
    if not proof.kept:
        verdict, at = ("broken", 4) if proof.cases else ("could-not-run", 0)
        return replace(record, verdict=verdict, level=1, at=at, detail=proof.failure)
    record = replace(record, planted=(*record.planted, planted))
    if not planted.caught:
        detail = f"the proof holds for a wrong subject: {planted.name}"
        return replace(record, verdict="void", level=1, detail=detail)
    return replace(record, level=4)
