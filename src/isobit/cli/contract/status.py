"""`isobit contract status`: show the status of contracts from existing evidence. Runs and imports nothing."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.contract_options import (
    FEW,
    add_place,
    exit_code,
    invalid_that_count,
    open_workspace,
    show_invalid,
)
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.contracts.store.evidence import Evidence, read_public
from isobit.contracts.store.sharing import Store, pull
from isobit.contracts.store.tree import Broken
from isobit.contracts.workspace import Workspace
from isobit.foundation.records import RUNGS, ContractStatus


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "status",
        description="Read contracts and evidence; run nothing, import neither torch nor the code they name. "
        "Contracts of isobit that were not judged on this machine are shown with the evidence that is shipped in the "
        "wheel, if there is any for the installed code. "
        "Exit 0: all kept; 1: something is broken, void, vacuous, unbound or waived; 2: something could not run, was "
        "not judged on this machine, or not up to the required level.",
        epilog="example: isobit contract status isobit",
    )
    add_place(parser)
    parser.add_argument(
        "--subject",
        default="",
        metavar="NAME|CODE",
        help="status of another subject of the contracts",
    )
    parser.add_argument(
        "--require-signature",
        action="append",
        default=[],
        metavar="PUBKEY",
        help="count only evidence that the holder of this Ed25519 key judged (a file; repeatable)",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="show each contract on each engine from the evidence in a folder or at s3://bucket/prefix",
    )
    parser.add_argument("--json", action="store_true", help="print JSON records instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print counts, and a table of contracts: those that are not kept, or all if they are few."""
    workspace, ids = open_workspace(options)
    if options.require_signature:
        workspace.require([read_public(path) for path in options.require_signature])
    if options.store:
        return show_store(options, workspace, ids)
    found = workspace.statuses(workspace.choose(ids, options.subject), options.subject)
    counting = invalid_that_count(options, workspace)
    if options.json:
        origin = provenance_of(options, [status.digest for status in found])
        say_json({"provenance": origin, "contracts": found})
    else:
        show(found, workspace, counting)
    return exit_code([*(s.verdict for s in found), *["broken"] * len(counting)])


def show_store(options: argparse.Namespace, workspace: Workspace, ids: list[str]) -> int:
    """Print a matrix of contracts and engines; the evidence is copied to a folder that is removed afterwards."""
    keys = workspace.evidence.keys
    with tempfile.TemporaryDirectory() as folder:
        workspace.evidence = Evidence(Path(folder) / ".isobit")
        workspace.evidence.base = Path.cwd()
        workspace.evidence.keys = keys
        pull(Store(options.store), workspace.evidence.folder)
        matrix, others = workspace.matrix(workspace.choose(ids, options.subject))
    engines = sorted({engine for row in matrix.values() for engine in row})
    words = [word for row in matrix.values() for word in row.values()]
    judged = {name: row for name, row in matrix.items() if row}
    if options.json:
        origin = provenance_of(
            options, [f"{n} {e} {w}" for n, r in matrix.items() for e, w in r.items()]
        )
        say_json({"provenance": origin, "engines": engines, "contracts": matrix, "others": others})
    else:
        console = make_console(132)
        if judged:
            table = Table("contract", *engines)
            for name, row in judged.items():
                table.add_row(name, *(row.get(engine, "-") for engine in engines))
            console.print(table)
        kept = sum(word.startswith("kept") for word in words)
        console.print(
            f"{kept} of {len(words)} verdicts are kept: {len(judged)} of {len(matrix)} contracts on {len(engines)} "
            f"engines; {others} files of other code, other contracts, or that do not count",
            markup=False,
        )
    verdicts = {word.rsplit(" ", 1)[0] for word in words}
    return exit_code(verdicts if len(judged) == len(matrix) else {*verdicts, "not-judged"})


def show(found: list[ContractStatus], workspace: Workspace, counting: Sequence[Broken]) -> None:
    """Print the table, invalid files, and counts."""
    console = make_console(118)
    table = Table("contract", "version", "verdict", "level", "detail")
    # What is shipped as kept and waits to be judged here is counted below; it is no row among the faults.
    some = found if len(found) <= FEW else [s for s in found if not is_fine(s)]
    for status in some[:FEW]:
        table.add_row(*cells(status))
    if some:
        console.print(table)
    if len(some) > FEW:
        rest = Counter(word_of(s) for s in some[FEW:])
        console.print("and more: " + ", ".join(f"{n:,} {word}" for word, n in rest.most_common()))
    show_invalid(console, workspace, counting)
    verdicts = Counter(word_of(s) for s in found)
    counts = ", ".join(f"{count:,} {word}" for word, count in verdicts.most_common())
    console.print(f"{len(found):,} contracts: {counts or 'none'}")
    show_rungs(console, "kept", Counter(s.level for s in found if s.verdict == "kept"))
    shipped = [s.shipped for s in found if s.shipped]
    if shipped:
        kept = sum(one.verdict == "kept" for one in shipped)
        console.print(
            f"shipped evidence: {kept:,} of {len(shipped):,} kept, judged on another machine; not judged on this "
            "machine: isobit verify isobit"
        )
        engines = " and ".join(sorted({one.engine for one in shipped}))
        (signer,) = {one.signed_by for one in shipped}
        signature = f"signed by Ed25519 key {signer}" if signer else "not signed"
        console.print(f"  on {engines}; {signature}", markup=False)
        show_rungs(
            console, "shipped as kept", Counter(s.level for s in shipped if s.verdict == "kept")
        )
    stale = workspace.shipped.stale
    if stale:
        reasons = "; ".join(sorted(set(stale.values())))
        console.print(f"shipped evidence is stale for {len(stale):,}, and ignored: {reasons}")


def is_fine(status: ContractStatus) -> bool:
    """Return whether a contract is kept here, or waits to be judged here and is shipped as kept."""
    shipped = status.shipped if status.verdict == "not-judged" else None
    return status.verdict == "kept" or (shipped is not None and shipped.verdict == "kept")


def word_of(status: ContractStatus) -> str:
    """Return the verdict for counts; of what was judged elsewhere alone, that."""
    if status.verdict == "not-judged" and status.shipped is not None:
        return "judged elsewhere only"
    return status.verdict


def cells(status: ContractStatus) -> tuple[str, ...]:
    """Return the row of one contract; what was only shipped is marked as that, with its machine and commit."""
    verdict, level, detail = status.verdict, status.level, status.detail
    if status.shipped:
        verdict, level = f"shipped: {status.shipped.verdict}", status.shipped.level
        detail = f"judged on {status.shipped.cpu} at {status.shipped.commit}, not here"
    return status.id, status.version, verdict, f"L{level} of L{status.required}", detail


def show_rungs(console: Console, word: str, levels: Counter[int]) -> None:
    """Print how many contracts reached each level."""
    for rung, count in sorted(levels.items(), reverse=True):
        console.print(f"  {count:,} {word} at L{rung}: {RUNGS[f'L{rung}']}")
