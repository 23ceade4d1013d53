"""Judge a contract: every claim at L1 and L2 here, at L3 and L4 in higher_levels.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from isobit.contracts.judge import static_checks
from isobit.contracts.judge.binding import bind, find_subject, subject_name
from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.cases import Progress, examine, shrink, unseen
from isobit.contracts.judge.higher_levels import judge_higher_levels
from isobit.contracts.judge.replay import failure_fields
from isobit.contracts.judge.sabotage_trials import try_planted
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.options import Options
from isobit.contracts.store.ladder import level_number, with_causes
from isobit.errors import IsobitError, in_one_line
from isobit.foundation.records import ClaimRecord

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
                if checks is None:
                    subject = find_subject(contract, options)
                    checks = static_checks.check(contract, subject, not options.subject)
                record = judge_claim(contract, claim, options, empty, checks, progress)
        except IsobitError as error:
            record = replace(empty, detail=in_one_line(error))
        except (Exception, SystemExit) as error:  # in a predicate, a proof or an import
            message = in_one_line(error)[:300]
            record = replace(empty, detail=f"raised {type(error).__name__}: {message}")
        yield with_causes(contract, replace(record, seconds=round(time.monotonic() - started, 3)))


def judge_claim(
    contract: Contract,
    claim: Claim,
    options: Options,
    empty: ClaimRecord,
    checks: Tally,
    progress: Progress = unseen,
) -> ClaimRecord:
    """Judge one claim level by level, until the level that it must reach or the first that fails."""
    bound = bind(contract, claim, options)
    required = min(level_number(claim.level), options.level)
    if checks.differing:
        record = replace(empty, verdict="broken", at=1, detail=checks.first)
        return replace(record, compared=checks.compared, differing=checks.differing)
    if required < 2:
        return replace(empty, verdict="kept", level=1, compared=checks.compared, cases=checks.cases)
    record, tally = judge_fixed_inputs(contract, bound, options, empty, progress)
    if record.verdict != "kept" or required == 2:
        return record
    return judge_higher_levels(contract, bound, options, tally, record)


def judge_fixed_inputs(
    contract: Contract,
    bound: Bound,
    options: Options,
    empty: ClaimRecord,
    progress: Progress = unseen,
) -> tuple[ClaimRecord, Tally]:
    """Judge L2: the listed inputs, and every planted wrong subject."""
    tally, failing = examine(contract, bound, options.thorough, progress=progress)
    record = replace(empty, level=1, **tally.counts())
    if tally.differing:
        progress(f"{bound.claim.id}: looking for a smaller case", 0, 1)
        smallest = shrink(contract, bound, failing)
        found = failure_fields(contract, bound, options, tally, smallest)
        return replace(record, verdict="broken", at=2, **found), tally
    idle = [name for name in bound.claim.params.get("under", ()) if not tally.shares.get(name)]
    if not tally.compared or not tally.cases or idle:
        detail = f"nothing was compared under {idle[0]}" if idle else "nothing was compared"
        return replace(record, verdict="vacuous", detail=detail), tally
    planted = []
    for one in try_planted(contract, bound, options):
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
