"""The ladder L0 to L4 and verdicts: the level of claims, obligations and contracts, computed from records."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.language.schema import LEVELS
from isobit.foundation.records import ClaimRecord

ENOUGH_INPUTS = 10_000

# Worst first: a contract has the worst verdict of its claims. "could-not-run": something that judging needs is missing.
# "not-judged": there is no evidence. "below-level": kept, but not up to the required level.
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
)  # verdicts that judging a claim can give
NOT_DRAWN = ("refuses", "launches", "certified")  # relations without inputs to draw


def level_number(level: str) -> int:
    """Return 3 for L3."""
    return LEVELS.index(level)


def worst(verdicts: Iterable[str]) -> str:
    """Return the worst of some verdicts; of none, "vacuous"."""
    return min(verdicts, key=VERDICTS.index, default="vacuous")


def unlinked(contract: Contract) -> tuple[str, ...]:
    """Return the obligations that have no claim."""
    linked = {name for claim in contract.claims for name in claim.obligations}
    return tuple(o.id for o in contract.obligations if o.id not in linked)


def earned_level(claim: Claim, expected: Set[str], found: Mapping[str, Any]) -> int:
    """Compute the level of a claim from its counts, planted subjects and proof.

    `found` has the fields of a ClaimRecord; `expected` are the wrong subjects that the claim must catch
    (`planted_names`).

    Raises:
        ValueError: The record is kept, but its counts contradict that.
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
    """Return "kept" only if every obligation has a claim and every claim reaches its level."""
    if unlinked(contract) or not contract.claims:
        return worst([*(r.verdict for r in records), "unbound"])
    known = {record.claim for record in records}
    missing = ["not-judged" for claim in contract.claims if claim.id not in known]
    short = ["below-level" for r in records if r.verdict == "kept" and r.level < r.required]
    return worst([*(r.verdict for r in records), *missing, *short])


def contract_level(contract: Contract, records: Sequence[ClaimRecord]) -> int:
    """Return the lowest level of the obligations: each has the level of its highest kept claim."""
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
    """Return the level of the contract when every claim reaches its own."""
    levels = [
        max(
            (level_number(c.level) for c in contract.claims if obligation.id in c.obligations),
            default=0,
        )
        for obligation in contract.obligations
    ]
    return min(levels, default=0)


def with_causes(contract: Contract, record: ClaimRecord) -> ClaimRecord:
    """Add to a broken claim what its contract says of likely causes."""
    if record.verdict != "broken":
        return record
    causes = next((c.if_fails for c in contract.claims if c.id == record.claim), "")
    return replace(record, if_fails=causes)


def waive(
    contract: Contract, record: ClaimRecord, today: datetime.date | None = None
) -> ClaimRecord:
    """Mark a claim that is not kept as waived until its waiver expires."""
    waiver = next((w for w in contract.waivers if w.claim == record.claim), None)
    if waiver is None or record.verdict == "kept":
        return record
    day = today or datetime.date.today()
    if datetime.date.fromisoformat(waiver.expires) < day:
        return replace(
            record, detail=f"waiver of {waiver.owner} expired on {waiver.expires}; {record.detail}"
        )
    words = f"waived by {waiver.owner} until {waiver.expires}: {waiver.reason}"
    return replace(
        record,
        verdict="waived",
        level=0,
        detail=f"{words}; it is {record.verdict}: {record.detail}",
    )
