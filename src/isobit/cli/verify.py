"""`isobit verify`: judge contracts that have no evidence, write the evidence, and show the status of all."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isobit.cli.arguments import add_engine, add_trust
from isobit.cli.contract_options import (
    FEW,
    LIBRARY,
    add_backend,
    add_place,
    exit_code,
    invalid_that_count,
    on_backend,
    open_chosen,
    show_invalid,
)
from isobit.cli.progress import Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.contracts.authoring.explain import explain
from isobit.contracts.language.schema import LEVELS
from isobit.contracts.options import Options
from isobit.contracts.report.page import draw_contracts
from isobit.contracts.store import ladder
from isobit.contracts.store.evidence import read_private
from isobit.contracts.store.tree import Broken, Entry
from isobit.contracts.workspace import Workspace, verdict_at
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.engines import LOCAL, check_engine
from isobit.foundation.plain_text import one_line
from isobit.foundation.records import ClaimRecord, ContractStatus, Provenance
from isobit.library.on_gpu.plans import ELSEWHERE, Derived, by_reason, summarise
from isobit.report.junit_sarif import as_junit, as_sarif


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        description="Judge every contract that has no evidence for its current digest (its text, the code it names, "
        "the kernels, the machine, and the contracts it depends on). If nothing changed, nothing is run. Exit codes: "
        "0: all kept; 1: something is broken, void, vacuous, unbound or waived; 2: something could not run or was "
        "not judged.",
        epilog="example: isobit verify my-kernel-v1.contract.yaml --trust my_package --level L2",
    )
    add_place(parser)
    add_trust(parser)
    parser.add_argument(
        "--level", choices=LEVELS[2:], default="L4", help="the highest level to judge (default L4)"
    )
    parser.add_argument(
        "--changed", action="store_true", help="show only contracts that were judged now"
    )
    parser.add_argument(
        "--again", action="store_true", help="judge contracts that have evidence too"
    )
    parser.add_argument(
        "--subject", default="", metavar="NAME|CODE", help="judge other code by the same contracts"
    )
    parser.add_argument(
        "--thorough", action="store_true", help="add the sizes that contracts list as thorough"
    )
    parser.add_argument(
        "--shard", default="1/1", metavar="I/N", help="judge the i-th of n shares of the contracts"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of processes (default 1)"
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="share evidence with others: take what is there, and put what is new; a folder or s3://bucket/prefix",
    )
    add_engine(parser)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no claim after this many seconds"
    )
    add_backend(parser)
    parser.add_argument(
        "--sign",
        metavar="KEY",
        help="sign new evidence with this Ed25519 key; what it has not signed is judged again",
    )
    parser.add_argument("--json", action="store_true", help="print JSON records instead of tables")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    parser.add_argument("--sarif", metavar="FILE", help="write SARIF")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write an HTML report with the graph, the ladder and every claim",
    )
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Judge the contracts that have no evidence, then show the status of all."""
    check_engine(arguments.on)
    workspace, ids = open_chosen(arguments)
    if arguments.store:
        workspace.evidence.share(arguments.store)
    if arguments.sign:
        sign_with(workspace, arguments.sign)
    options = Options(
        trusted=tuple(arguments.trust),
        level=LEVELS.index(arguments.level),
        thorough=arguments.thorough,
        subject=arguments.subject,
        seconds=arguments.seconds,
    )
    entries = workspace.choose(ids, options.subject, parse_shard(arguments.shard))
    # Dependencies are judged too, but not with another subject.
    every = entries if options.subject else workspace.with_dependencies(entries)
    stale = workspace.in_order(every) if arguments.again else workspace.stale(every, options)
    with on_backend(arguments):
        judged = judge(workspace, stale, options, arguments)
    statuses = [
        with_this_run(status, judged.get(status.id))
        for status in workspace.statuses(entries, options.variant, True, options.level)
    ]
    shown = [s for s in statuses if s.id in judged] if arguments.changed else statuses
    counting = invalid_that_count(arguments, workspace)
    provenance = provenance_of(arguments, [status.digest for status in shown])
    write_reports(arguments, workspace, shown, provenance)
    derived = found_on(workspace, named_ids(arguments, entries)) if arguments.backend else []
    if arguments.json:
        backend = (
            {"backend": summarise(derived, arguments.backend, arguments.target)}
            if arguments.backend
            else {}
        )
        say_json({"provenance": provenance, **backend, "contracts": shown})
    else:
        show(shown, judged, workspace, options.level, counting)
        if arguments.backend:
            show_backend(make_console(132), derived, arguments)
    workspace.evidence.catch_up()
    verdicts = [verdict_at(status, options.level) for status in statuses]
    return exit_code([*verdicts, *["broken"] * len(counting)])


def named_ids(arguments: argparse.Namespace, entries: list[Entry]) -> list[str]:
    """Return the ids of what was judged, and of isobit's contracts that do not apply if all were named."""
    judged = [entry.id for entry in entries]
    if LIBRARY not in arguments.which or arguments.shard != "1/1":
        return judged
    return [*judged, *(name for name in ELSEWHERE if name not in judged)]


def sign_with(workspace: Workspace, path: str) -> None:
    """Sign new evidence, and judge again what this key has not signed: that may be anybody's."""
    workspace.evidence.signer = read_private(path)
    workspace.require([workspace.evidence.signer.public_key()])


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `2/5` to (2, 5)."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ArgumentError(
            expected="--shard I/N with 1 ≤ I ≤ N", received=text, remedy="for example --shard 1/4"
        )
    return int(match[1]), int(match[2])


def judge(
    workspace: Workspace, stale: list[Entry], options: Options, arguments: argparse.Namespace
) -> dict[str, list[ClaimRecord]]:
    """Judge contracts, showing each claim on the error stream."""
    judged: dict[str, list[ClaimRecord]] = {entry.id: [] for entry in stale}
    if not stale:
        return judged
    names = [
        f"{entry.id}/{claim.id}"
        for entry in stale
        for claim in workspace.tree.load(entry.id).claims
    ]
    # Several processes finish claims in any order.
    in_order = arguments.jobs == 1 and arguments.on == LOCAL
    follows = dict(pairwise(names)) if in_order else {}
    with Steps("".join(names[:1]), len(names), arguments.quiet) as steps:
        for entry, record in workspace.judge(stale, options, arguments.jobs, arguments.on):
            judged[entry.id].append(record)
            name = f"{entry.id}/{record.claim}"
            steps.done(f"{name}: {record.verdict}", follows.get(name, ""), record.seconds)
    return judged


def with_this_run(status: ContractStatus, judged: list[ClaimRecord] | None) -> ContractStatus:
    """Replace the status by this run's result if that is worse, or if --seconds ended it before evidence."""
    found = ladder.worst(record.verdict for record in judged) if judged else "kept"
    if (
        judged
        and ladder.worst([found, status.verdict]) != status.verdict
        and status.verdict != "waived"
    ):
        return replace(status, claims=tuple(judged), verdict=found, level=0)
    return status


def write_reports(
    arguments: argparse.Namespace,
    workspace: Workspace,
    found: list[ContractStatus],
    provenance: Provenance,
) -> None:
    """Write the reports that the command line names."""
    if arguments.junit:
        files.write_text(Path(arguments.junit), as_junit(found, provenance))
    if arguments.sarif:
        files.write_text(Path(arguments.sarif), as_sarif(found, provenance))
    if arguments.html:
        sections = {s.id: explain(workspace.tree.load(s.id), s) for s in found}
        page = draw_contracts(found, sections, "isobit verify", provenance)
        files.write_text(Path(arguments.html), page)


def show(
    found: list[ContractStatus],
    judged: dict[str, list[ClaimRecord]],
    workspace: Workspace,
    level: int,
    counting: Sequence[Broken],
) -> None:
    """Print claims and contracts that are not kept, and the totals."""
    console = make_console(132)
    if found and len(found) <= FEW:
        console.print(claims_table(found, level))
    for status in found:
        for claim in status.claims:
            if claim.verdict != "kept":
                console.print(
                    one_line(f"{claim.verdict.upper()} {status.id}/{claim.claim}: {claim.detail}")
                )
                if claim.if_fails:
                    causes = f"  likely causes: {one_line(claim.if_fails)}"
                    console.print(causes, markup=False, soft_wrap=True)
                if claim.replay:
                    console.print(f"  {claim.replay}", markup=False, soft_wrap=True)
        if (not status.claims and status.verdict != "kept") or status.weak:
            console.print(one_line(f"{status.verdict.upper()} {status.id}: {status.detail}"))
        now = judged.get(status.id)
        if status.verdict in ladder.RED and now and all(record.verdict == "kept" for record in now):
            there = ", ".join(workspace.evidence.names().get(status.digest, []))
            console.print(
                f"  kept in this run, but other evidence for the same digest is red, and counts: {there}",
                markup=False,
            )
            console.print(
                "  delete these files if they were written in another environment", markup=False
            )
    show_invalid(console, workspace, counting)
    claims = [c for s in found for c in s.claims]
    planted = [p for c in claims for p in c.planted]
    console.print(
        f"{sum(verdict_at(s, level) == 'kept' for s in found)} of {len(found)} contracts kept"
        f"{f' up to L{level}' if level < 4 else ''}, {len(judged)} judged now; "
        f"{sum(c.verdict == 'kept' for c in claims)} of {len(claims)} claims; "
        f"sabotage caught {sum(p.caught for p in planted)} of {len(planted)}; "
        f"{sum(c.inputs for c in claims):,} inputs, {sum(c.compared for c in claims):,} comparisons"
    )


def claims_table(found: list[ContractStatus], level: int) -> Table:
    """Return a table with a row per claim."""
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
    """Return how many elements differ, and the level at which that was found if it is not L2."""
    if claim.at == 4:
        return "proof, at L4"
    return f"{claim.differing:,}" + (f", at L{claim.at}" if claim.at in (1, 3) else "")


def engine_word(engine: str) -> str:
    """Shorten `enumeration of the real kernel` to its first word."""
    return re.split(" (?:of|on|over) ", engine)[0]


def found_on(workspace: Workspace, ids: Iterable[str]) -> list[Derived]:
    """Return what was derived of the contracts with these ids; with `isobit`, all of them."""
    from isobit.library.on_gpu.plans import BackendTree

    assert isinstance(workspace.tree, BackendTree)
    return [workspace.tree.derived[id] for id in ids if id in workspace.tree.derived]


def show_backend(console: Console, derived: Sequence[Derived], options: argparse.Namespace) -> None:
    """Print which backend ran, on how many cases, and by reason what has no meaning on it."""
    found = summarise(derived, options.backend, options.target)
    claims, parts = found["claims_not_applicable"], found["parts_not_applicable"]
    for what, left in (("claims", claims), ("parts of claims", parts)):
        for reason, names in by_reason(left).items():
            console.print(
                f"not applicable, {len(names)} {what} ({reason}): {', '.join(names)}",
                markup=False,
                soft_wrap=True,
            )
    console.print(
        f"Triton executors by {options.backend}, {options.target}, judged up to L2 on {found['cases']:,} small cases "
        f"(the CPU's executors: {found['cases_on_cpu']:,}); not applicable: {len(claims)} claims, and {len(parts)} "
        "parts of others",
        markup=False,
    )
