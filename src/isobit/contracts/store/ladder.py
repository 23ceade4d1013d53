"""The ladder L0 to L4 and the words of verdicts: where claims, obligations and contracts stand, from records alone."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.language.schema import LEVELS
from isobit.records import ClaimRecord

RUNGS = {
    "L0": "well-formed, every obligation linked to a claim",
    "L1": "schema, operator check, shapes and dtypes by construction",
    "L2": "every falsification test ran, every sabotage was caught",
    "L3": "at least 10,000 inputs",
    "L4": "proved, by the engine named",
}
ENOUGH_INPUTS = 10_000

# Worst first: a contract has the worst verdict of its claims. "could-not-run" was tried, and something that it needs is
# missing; "not-judged" has no evidence; "below-level" is kept, but not as high as it must reach.
VERDICTS = (
    "broken",
    "void",
    "vacuous",
    "unbound",
    "could-not-run",
    "not-judged",
    "below-level",
    "waived",
    "kept",
)
RED = ("broken", "void")
UNSETTLED = ("could-not-run", "not-judged", "below-level")
JUDGED = (
    "broken",
    "void",
    "vacuous",
    "unbound",
    "could-not-run",
    "kept",
)  # what judging a claim can say
NOT_DRAWN = ("refuses", "launches")  # relations without inputs to draw


def level_number(level: str) -> int:
    """L3 is 3."""
    return LEVELS.index(level)


def worst(verdicts: Iterable[str]) -> str:
    """Nothing at all is vacuous."""
    return min(verdicts, key=VERDICTS.index, default="vacuous")


def unlinked(contract: Contract) -> tuple[str, ...]:
    """Obligations that no claim makes executable."""
    linked = {name for claim in contract.claims for name in claim.obligations}
    return tuple(o.id for o in contract.obligations if o.id not in linked)


def earned_level(claim: Claim, expected: Set[str], found: Mapping[str, Any]) -> int:
    """The level that a claim's counts, planted subjects and proof earn; `found` has the fields of a ClaimRecord.

    `expected` are the wrong subjects that the claim must catch (`planted_names`).

    Raises:
        ValueError: a record that says kept, and whose counts say otherwise.
    """
    if found["relation"] != claim.relation:
        raise ValueError(f"its relation is {claim.relation}")
    if found["verdict"] != "kept":
        return 1 if found["cases"] else 0
    if found["differing"]:
        raise ValueError(f"kept, though {found['differing']:,} differ")
    if not found["compared"] or not found["cases"]:
        raise ValueError("kept, though nothing was compared")
    for planted in found["planted"]:
        if not planted.caught:
            raise ValueError(f"kept, though {planted.name} was not caught")
    caught = {planted.name for planted in found["planted"]}
    if claim.level in LEVELS[:2] or not expected or not caught >= expected:
        return 1
    is_drawn, proof = found["drawn"] >= ENOUGH_INPUTS, found["proof"]
    is_proved = claim.proof and proof and proof.kept and f"proof: {claim.proof.planted}" in caught
    if is_proved and (is_drawn or claim.relation in NOT_DRAWN):
        return 4
    return 3 if is_drawn else 2


def contract_verdict(contract: Contract, records: Sequence[ClaimRecord]) -> str:
    """Kept only if every obligation is linked and every claim is kept at the level it asks for."""
    if unlinked(contract) or not contract.claims:
        return worst([*(r.verdict for r in records), "unbound"])
    known = {record.claim for record in records}
    missing = ["not-judged" for claim in contract.claims if claim.id not in known]
    short = ["below-level" for r in records if r.verdict == "kept" and r.level < r.required]
    return worst([*(r.verdict for r in records), *missing, *short])


def contract_level(contract: Contract, records: Sequence[ClaimRecord]) -> int:
    """The lowest of its obligations; an obligation stands as high as its highest kept claim, if none is red."""
    if unlinked(contract):
        return 0
    levels = []
    for obligation in contract.obligations:
        claims = {claim.id for claim in contract.claims if obligation.id in claim.obligations}
        found = [r for r in records if r.claim in claims]
        kept = [r.level for r in found if r.verdict == "kept"]
        levels.append(0 if any(r.verdict in RED for r in found) else max(kept, default=0))
    return min(levels, default=0)


def required_level(contract: Contract) -> int:
    """Where the contract stands when every claim reaches the level it asks for."""
    asked = [
        max(
            (level_number(c.level) for c in contract.claims if obligation.id in c.obligations),
            default=0,
        )
        for obligation in contract.obligations
    ]
    return min(asked, default=0)


def waive(
    contract: Contract, record: ClaimRecord, today: datetime.date | None = None
) -> ClaimRecord:
    """A claim that is not kept is waived while its waiver holds; an expired one is said to be."""
    waiver = next((w for w in contract.waivers if w.claim == record.claim), None)
    if waiver is None or record.verdict == "kept":
        return record
    day = today or datetime.date.today()
    if datetime.date.fromisoformat(waiver.expires) < day:
        return replace(
            record, detail=f"waiver of {waiver.owner} expired on {waiver.expires}; {record.detail}"
        )
    said = f"waived by {waiver.owner} until {waiver.expires}: {waiver.reason}"
    return replace(
        record, verdict="waived", level=0, detail=f"{said}; it is {record.verdict}: {record.detail}"
    )
