"""`isobit verify`: judges contracts whose digest has no evidence yet, keeps the evidence, and shows where all stand."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from isobit import files
from isobit.cli.contract_options import add_place, add_trust, exit_code, open_workspace
from isobit.cli.progress import Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console
from isobit.contracts.language.explain import explain
from isobit.contracts.language.load import load_contract
from isobit.contracts.language.schema import LEVELS
from isobit.contracts.store import ladder
from isobit.contracts.store.signing import read_private
from isobit.contracts.store.tree import Entry
from isobit.contracts.workspace import Run, Workspace, key_of, verdict_at
from isobit.errors import ArgumentError
from isobit.plain_text import one_line
from isobit.records import ClaimRecord, ContractStatus, Provenance, to_json
from isobit.report.contract_page import draw_contracts
from isobit.report.junit_sarif import as_junit, as_sarif

FEW = 40


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="judge contracts, and keep the evidence",
        description="Judges every contract that has no evidence at its present digest (its text, the code it binds, "
        "the kernels, the machine's engine, and the contracts it rests on); an unchanged tree runs nothing. Exit 0: "
        "all kept; 1: something is broken, void, vacuous, unbound or waived; 2: something could not run or "
        "was not judged.",
    )
    add_place(parser)
    add_trust(parser)
    parser.add_argument(
        "--level", choices=LEVELS[2:], default="L4", help="how high to climb (default L4)"
    )
    parser.add_argument("--changed", action="store_true", help="show only what was judged now")
    parser.add_argument("--again", action="store_true", help="judge also what has evidence")
    parser.add_argument(
        "--subject", default="", metavar="NAME|CODE", help="judge other code by the same contracts"
    )
    parser.add_argument(
        "--thorough", action="store_true", help="the sizes that contracts keep for long runs"
    )
    parser.add_argument(
        "--shard", default="1/1", metavar="I/N", help="the i-th of n parts, by a hash of the id"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="contracts judged at once (default 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no claim after so long"
    )
    parser.add_argument(
        "--sign",
        metavar="KEY",
        help="sign new evidence with this Ed25519 key; what it has not signed is judged again",
    )
    parser.add_argument("--json", action="store_true", help="print JSON records instead of tables")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    parser.add_argument("--sarif", metavar="FILE", help="write SARIF")
    parser.add_argument(
        "--html", metavar="FILE", help="write one page with the graph, the ladder and every claim"
    )
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Judges what is stale, then shows all."""
    workspace, ids = open_workspace(options)
    if options.sign:
        sign_with(workspace, options.sign)
    asked = Run(
        tuple(options.trust),
        LEVELS.index(options.level),
        options.thorough,
        options.subject,
        options.seconds,
    )
    entries = workspace.choose(ids, options.subject, shard_of(options.shard))
    # What they rest on is judged too; by another subject's run it is not.
    whole = entries if options.subject else workspace.with_dependencies(entries)
    stale = workspace.in_order(list(whole)) if options.again else workspace.stale(whole, asked)
    judged = judge(workspace, stale, asked, options)
    claims = len(entries) <= FEW or bool(
        options.json or options.junit or options.sarif or options.html
    )
    statuses = workspace.statuses(entries, key_of(asked), claims, asked.level)
    every = [cut_short(status, judged.get(status.id)) for status in statuses]
    found = [status for status in every if status.id in judged] if options.changed else every
    origin = provenance_of(options, [status.digest for status in found])
    write_reports(options, found, origin)
    if options.json:
        print(to_json({"provenance": origin, "contracts": found}))
    else:
        show(found, judged, workspace, asked.level)
    verdicts = [verdict_at(status, asked.level) for status in every]
    return exit_code([*verdicts, *["broken"] * len(workspace.tree.broken)])


def sign_with(workspace: Workspace, path: str) -> None:
    """Evidence that this key did not sign may be anybody's: it is judged again, never signed unseen."""
    workspace.evidence.signer = read_private(path)
    workspace.require([workspace.evidence.signer.public_key()])


def shard_of(text: str) -> tuple[int, int]:
    """2/5."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ArgumentError(expected="--shard I/N with 1 ≤ I ≤ N", received=text, remedy="as 1/4")
    return int(match[1]), int(match[2])


def judge(
    workspace: Workspace, stale: list[Entry], asked: Run, options: argparse.Namespace
) -> dict[str, list[ClaimRecord]]:
    """Judge what is stale, naming each claim on the error stream while it is judged."""
    judged: dict[str, list[ClaimRecord]] = {entry.id: [] for entry in stale}
    if not stale:
        return judged
    names = [
        f"{entry.id}/{claim.id}"
        for entry in stale
        for claim in load_contract(Path(entry.path)).claims
    ]
    follows = (
        dict(pairwise(names)) if options.jobs == 1 else {}
    )  # several at once finish in any order
    with Steps("".join(names[:1]), len(names), options.quiet) as steps:
        for entry, record in workspace.judge(stale, asked, options.jobs):
            judged[entry.id].append(record)
            name = f"{entry.id}/{record.claim}"
            steps.done(f"{name}: {record.verdict}", follows.get(name, ""), record.seconds)
    return judged


def cut_short(status: ContractStatus, judged: list[ClaimRecord] | None) -> ContractStatus:
    """What was found just now counts, also where it is worse than evidence, or --seconds left it without any."""
    found = ladder.worst(record.verdict for record in judged) if judged else "kept"
    if (
        judged
        and ladder.worst([found, status.verdict]) != status.verdict
        and status.verdict != "waived"
    ):
        return replace(status, claims=tuple(judged), verdict=found, level=0)
    return status


def write_reports(
    options: argparse.Namespace, found: list[ContractStatus], origin: Provenance
) -> None:
    """Each whole or not at all."""
    if options.junit:
        files.write_text(Path(options.junit), as_junit(found, origin))
    if options.sarif:
        files.write_text(Path(options.sarif), as_sarif(found, origin))
    if options.html:
        sections = {s.id: explain(load_contract(Path(s.path)), s) for s in found}
        files.write_text(
            Path(options.html), draw_contracts(found, sections, "isobit verify", origin)
        )


def show(
    found: list[ContractStatus],
    judged: dict[str, list[ClaimRecord]],
    workspace: Workspace,
    level: int,
) -> None:
    """For people: a line a claim where something ran or went wrong, then a line a contract, then the totals."""
    console = make_console(132)
    if found and len(found) <= FEW:
        console.print(claims_table(found, level))
    for status in found:
        for claim in status.claims:
            if claim.verdict != "kept":
                console.print(
                    one_line(f"{claim.verdict.upper()} {status.id}/{claim.claim}: {claim.detail}")
                )
                if claim.replay:
                    console.print(f"  {claim.replay}", markup=False, soft_wrap=True)
        if (not status.claims and status.verdict != "kept") or status.weak:
            console.print(one_line(f"{status.verdict.upper()} {status.id}: {status.detail}"))
        now = judged.get(status.id)
        if status.verdict in ladder.RED and now and all(record.verdict == "kept" for record in now):
            there = ", ".join(workspace.evidence.names().get(status.digest, []))
            console.print(
                f"  kept just now, but red before at the same digest, and red wins: {there}",
                markup=False,
            )
            console.print("  delete what was written in other surroundings", markup=False)
    for broken in workspace.tree.broken:
        console.print(f"REFUSED {broken.error}", markup=False)
    for name, reason in list(workspace.evidence.refused.items())[:FEW]:
        console.print(f"evidence that does not count, {reason}: {name}", markup=False)
    claims = [c for s in found for c in s.claims]
    planted = [p for c in claims for p in c.planted]
    console.print(
        f"{sum(verdict_at(s, level) == 'kept' for s in found)} of {len(found)} contracts kept"
        f"{f' as far as L{level}' if level < 4 else ''}, {len(judged)} judged now; "
        f"{sum(c.verdict == 'kept' for c in claims)} of {len(claims)} claims; "
        f"sabotage caught {sum(p.caught for p in planted)} of {len(planted)}; "
        f"{sum(c.inputs for c in claims):,} inputs, {sum(c.compared for c in claims):,} comparisons"
    )


def claims_table(found: list[ContractStatus], level: int) -> Table:
    """A row a claim."""
    columns = (
        "contract / claim",
        "verdict",
        "level",
        "inputs",
        "differ",
        "of",
        "caught",
        "proved by, cases",
    )
    table = Table(*columns, box=SIMPLE_HEAD)
    for status in found:
        short = f"L{status.level}" + (
            f" of L{status.required}" if status.level < status.required else ""
        )
        table.add_row(Text(status.id, "bold"), verdict_at(status, level), short, "", "", "", "", "")
        for claim in status.claims:
            caught = f"{sum(p.caught for p in claim.planted)} of {len(claim.planted)}"
            proof = (
                f"{engine_word(claim.proof.engine)}, {claim.proof.cases:,}" if claim.proof else ""
            )
            rung = (
                f"L{claim.level}"
                if claim.level >= claim.required
                else f"L{claim.level} of L{claim.required}"
            )
            row = (f"{claim.inputs:,}", differ_of(claim), f"{claim.compared:,}", caught, proof)
            table.add_row(f"  {claim.claim}", claim.verdict, rung, *row)
    return table


def differ_of(claim: ClaimRecord) -> str:
    """How many differ, and at which rung where it is not L2: an input drawn at L3, or what a proof found."""
    if claim.at == 4:
        return "proof, at L4"
    return f"{claim.differing:,}" + (f", at L{claim.at}" if claim.at in (1, 3) else "")


def engine_word(engine: str) -> str:
    """`enumeration of the real kernel` in a word; `isobit explain` says it whole."""
    return re.split(" (?:of|on|over) ", engine)[0]
