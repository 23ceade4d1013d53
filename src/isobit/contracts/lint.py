"""Lint: everything that can be said of contracts without running them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

from isobit.contracts.contract import Contract
from isobit.contracts.grammar import suggest
from isobit.contracts.load import load_contract
from isobit.contracts.sabotage_names import LIBRARY_NAMES, has_default
from isobit.contracts.sources import find_file, installed_version
from isobit.contracts.tree import Tree, missing
from isobit.errors import ContractError


def lint(tree: Tree) -> Iterator[ContractError]:
    """Every problem of the chosen contracts, file by file."""
    yield from (broken.error for broken in tree.broken)
    for id in tree.chosen:
        entry = tree.entries[id]
        for name in entry.depends_on:
            if name not in tree.entries:
                yield missing(entry, name, tree.entries)
        try:
            if all(name in tree.entries for name in entry.depends_on):
                tree.digest(id)
            contract = load_contract(Path(entry.path))
        except ContractError as error:
            yield error
            continue
        yield from lint_contract(contract, entry.path)


def lint_contract(contract: Contract, where: str) -> Iterator[ContractError]:
    """One contract by itself."""
    linked = {name for claim in contract.claims for name in claim.obligations}
    for obligation in contract.obligations:
        if obligation.id not in linked:
            yield problem(
                "a claim for every obligation", f"none for {obligation.id}", "add a claim", where, obligation.line
            )
    for reference in contract.code():
        module = reference.partition(":")[0]
        if find_file(module) is None and not installed_version(module.partition(".")[0]):
            yield problem(
                f"{module} to be found", "no such module", "mend the name, or run where it can be imported", where
            )
    for claim in contract.claims:
        planted = (*claim.sabotage, *((claim.proof.planted,) if claim.proof else ()))
        for name in planted:
            if ":" not in name and name not in LIBRARY_NAMES:
                yield problem("a sabotage of the library", repr(name), suggest(name, LIBRARY_NAMES), where, claim.line)
        if not claim.sabotage and not has_default(claim.relation):
            yield problem(
                f"sabotage for claim {claim.id}: the library has none for {claim.relation}",
                "none",
                "name a planted wrong subject as package:function",
                where,
                claim.line,
            )
    for waiver in contract.waivers:
        if datetime.date.fromisoformat(waiver.expires) < datetime.date.today():
            yield problem(
                "waivers that have not expired",
                f"{waiver.claim} by {waiver.owner}, expired on {waiver.expires}",
                "mend the code, or renew the waiver",
                where,
                waiver.line,
            )


def problem(expected: str, received: str, remedy: str, where: str, line: int = 0) -> ContractError:
    """At a place in a file."""
    return ContractError(expected=expected, received=received, remedy=remedy, where=where, line=line)
