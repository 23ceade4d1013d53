"""Lint contracts: report every problem that can be found without running their code."""

from __future__ import annotations

import ast
import datetime
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from isobit.contracts.language.contract import LIBRARY_NAMES, Contract, has_default
from isobit.contracts.language.grammar import suggest
from isobit.contracts.store.ladder import unlinked
from isobit.contracts.store.sources import find_file, installed_version
from isobit.contracts.store.tree import Tree, missing
from isobit.errors import ContractError


def lint(tree: Tree) -> Iterator[ContractError]:
    """Yield the problems of the chosen contracts, file by file."""
    yield from (broken.error for broken in tree.broken)
    for id in tree.chosen:
        entry = tree.entries[id]
        for name in entry.depends_on:
            if name not in tree.entries:
                yield missing(entry, name, tree.entries)
        try:
            if all(name in tree.entries for name in entry.depends_on):
                tree.digest(id)
            contract = tree.load(id)
        except ContractError as error:
            yield error
            continue
        yield from lint_contract(contract, entry.path)
        for number, line in enumerate(Path(entry.path).read_text(encoding="utf-8").splitlines(), 1):
            if "FILL IN" in line and not line.startswith("# Made by"):
                expected = "a completed contract without FILL IN"
                yield problem(expected, line.strip()[:80], "replace it", entry.path, number)
                break


def lint_contract(contract: Contract, where: str) -> Iterator[ContractError]:
    """Yield the problems of one contract by itself."""
    missing_claims = unlinked(contract)
    for obligation in contract.obligations:
        if obligation.id in missing_claims:
            expected = "a claim for every obligation"
            received = f"none for {obligation.id}"
            yield problem(expected, received, "add a claim", where, obligation.line)
    for reference in contract.code():
        module = reference.partition(":")[0]
        if find_file(module) is None and not installed_version(module.partition(".")[0]):
            remedy = "correct the name, or run where it can be imported"
            yield problem(f"an existing module {module}", "no such module", remedy, where)
        elif (name := missing_name(reference)) is not None:
            yield problem(
                f"an existing name {reference}", "no such name in that module", name, where
            )
    for claim in contract.claims:
        planted = (*claim.sabotage, *((claim.proof.planted,) if claim.proof else ()))
        for name in planted:
            if ":" not in name and name not in LIBRARY_NAMES:
                remedy = suggest(name, LIBRARY_NAMES)
                yield problem("a built-in sabotage", repr(name), remedy, where, claim.line)
        if not claim.sabotage and not has_default(claim.relation):
            yield problem(
                f"sabotage for claim {claim.id}: there is no built-in one for {claim.relation}",
                "none",
                "name a planted wrong subject as package:function",
                where,
                claim.line,
            )
    for waiver in contract.waivers:
        if datetime.date.fromisoformat(waiver.expires) < datetime.date.today():
            received = f"{waiver.claim} by {waiver.owner}, expired on {waiver.expires}"
            remedy = "fix the code, or renew the waiver"
            yield problem("waivers that have not expired", received, remedy, where, waiver.line)


def missing_name(reference: str) -> str | None:
    """Return a suggestion if a module's source does not define a name; the source is not run."""
    module, _, path = reference.partition(":")
    file = find_file(module)
    if file is None or file.suffix != ".py":
        return None
    stub = file.with_suffix(".pyi")  # lists the names that a package imports lazily
    names = names_in(file.read_bytes() + (b"\n" + stub.read_bytes() if stub.is_file() else b""))
    word = path.partition(".")[0]
    return (
        None if word in names or "*" in names else suggest(word, sorted(names) or ["(it has none)"])
    )


@lru_cache(maxsize=512)  # most names of a contract are in a few files
def names_in(source: bytes) -> frozenset[str]:
    """Return every name that a source defines or imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def problem(expected: str, received: str, remedy: str, where: str, line: int = 0) -> ContractError:
    """Build the error for a problem at a place in a file."""
    return ContractError(
        expected=expected, received=received, remedy=remedy, where=where, line=line
    )
