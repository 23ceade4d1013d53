"""Judge one counter-example again, and write the command that does so."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from isobit.contracts.judge.binding import bind
from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.cases import examine, run_both
from isobit.contracts.judge.integers_search import examine_integers
from isobit.contracts.judge.recipes import Recipe
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.options import Options
from isobit.contracts.store.sources import is_interpreted
from isobit.contracts.store.tree import library


def replay(contract: Contract, claim: Claim, options: Options, recipe: str) -> Tally:
    """Judge one case, or all fixed cases if `recipe` is empty."""
    bound, tally = bind(contract, claim, options), Tally()
    if not recipe or claim.relation in ("refuses", "certified"):
        return examine(contract, bound, options.thorough)[0]
    if claim.relation == "algebra":
        examine_integers(bound, tally, recipe)
    else:
        run_both(contract, bound, Recipe.parse(recipe, contract.inputs), tally)
    return tally


def failure_fields(
    contract: Contract, bound: Bound, options: Options, tally: Tally, smallest: Recipe | str | None
) -> dict[str, Any]:
    """Return `detail` and `replay` of a broken claim's record, for its smallest counter-example.

    A search does not count the case that it fails on: if `tally` has no difference yet, that case is
    added to it.
    """
    detail = tally.first
    if isinstance(smallest, Recipe):
        again = Tally()
        run_both(contract, bound, smallest, again)
        detail = again.first or detail
        if not tally.differing:
            tally.add(again)
    elif smallest:
        detail = smallest
    return {"detail": detail, "replay": replay_command(contract, bound.claim, options, smallest)}


def replay_command(
    contract: Contract, claim: Claim, options: Options, case: Recipe | str | None
) -> str:
    """Return the shell command that judges a case of a claim again."""
    words = ["TRITON_INTERPRET=1"] if is_interpreted() else []
    words += ["isobit", "contract", "replay", f"{contract.id}/{claim.id}"]
    if case:
        words += ["--case", f"'{case}'"]
    if options.subject:
        words += ["--subject", shlex.quote(options.subject)]
    for package in options.trusted:
        words += ["--trust", package]
    if contract.path and library() not in Path(contract.path).resolve().parents:
        words += ["--file", contract.path]
    return " ".join(words)
