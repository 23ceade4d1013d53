"""Judge a claim on its planted wrong subjects and controls: each must be caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from isobit.contracts.judge import proving
from isobit.contracts.judge.binding import plant
from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.cases import examine
from isobit.contracts.language.contract import Contract
from isobit.contracts.language.sabotage_names import default_sabotage, for_transform
from isobit.contracts.options import Options
from isobit.errors import in_one_line
from isobit.foundation.records import Planted


def try_planted(contract: Contract, bound: Bound, options: Options) -> Iterator[Planted]:
    """Judge the claim's fixed inputs on each wrong subject and each control."""
    claim = bound.claim
    if claim.relation != "invariant" or claim.sabotage:
        for name in claim.sabotage or default_sabotage(claim.relation, claim.params):
            yield try_one(contract, plant(bound, name, options), name, options)
    else:
        # Each transform must catch by itself what is planted for it.
        for transform in claim.params["under"]:
            params = {**claim.params, "under": (transform,)}
            alone = replace(bound, claim=replace(claim, params=params))
            names = for_transform(transform, claim.params)
            if not names:
                yield Planted(
                    transform, False, "there is no built-in sabotage for it: name its sabotage"
                )
            for name in names:
                planted = plant(alone, name, options)
                yield try_one(contract, planted, f"{name}, under {transform}", options)
    for name in claim.control:
        yield try_one(contract, plant(bound, name, options), f"control {name}", options)


def try_one(contract: Contract, bound: Bound, name: str, options: Options) -> Planted:
    """Judge one wrong subject. A difference catches it; an exception does not."""
    try:
        tally, _ = examine(contract, bound, options.thorough, first_only=True)
    except (Exception, SystemExit) as error:
        return Planted(name, False, f"raised {type(error).__name__}: {in_one_line(error)[:200]}")
    if not tally.differing and bound.claim.relation == "algebra" and bound.claim.proof is not None:
        # A solver finds integers that are rare to draw.
        wrong = proving.run_proof(contract, bound)
        return Planted(name, not wrong.kept, wrong.failure)
    return Planted(
        name, tally.differing > 0, tally.first or f"{tally.compared:,} compared, none differ"
    )
