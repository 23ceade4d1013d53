"""`isobit compare rollouts`: name what makes a rollout's log-probabilities differ from a trainer's."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.arguments import add_engine, at_least_one
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.comparing.rollouts.report import RolloutReport, write_rollout_page
from isobit.foundation import files
from isobit.foundation.engines import LOCAL, check_engine
from isobit.foundation.plain_text import one_line


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "rollouts",
        description="Compare what a rollout engine and a trainer computed for the same tokens. Says which of semantics "
        "(ids, shift, mask, positions, temperature, truncation, normaliser), weights (by digests) or numerics differs, "
        "and prints the metrics under the names that RL frameworks log. Files are JSONL or Parquet: one "
        "record per sequence with token_ids and logprobs, and optionally id, prompt_token_ids, mask, positions, rows, "
        "support, temperature, top_k, top_p, normaliser; a record with weights has digests. "
        "Exit 0: equal; 1: something differs; 2: could not read, or nothing to compare.",
        epilog="example: isobit compare rollouts rollout.jsonl trainer.jsonl --html mismatch.html",
    )
    files_help = "a JSONL or Parquet file, a folder of them, or an address (s3://…)"
    parser.add_argument("rollout", help=f"what the engine computed: {files_help}")
    parser.add_argument("trainer", help="what the trainer computed, likewise")
    parser.add_argument(
        "--limit",
        type=int,
        default=20,
        help="findings to print; 0 for all (default: %(default)s)",
    )
    add_engine(parser)
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        default=1,
        metavar="N",
        help="local processes, for folders of as many files on both sides (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report")


def run(options: argparse.Namespace) -> int:
    """Compare and print. The exit code is 0 if equal, 1 if something differs, 2 if nothing was compared."""
    from isobit.comparing.rollouts.comparing import compare, compare_on
    from isobit.comparing.rollouts.reading import digest_side

    check_engine(options.on)
    sides = (options.rollout, options.trainer)
    alone = options.on == LOCAL and options.jobs == 1
    found = compare(*sides) if alone else compare_on(*sides, options.on, options.jobs)
    wanted = options.html or options.json
    origin = provenance_of(options, [digest_side(one) for one in sides] if wanted else [])
    if options.html:
        names = (options.rollout.rsplit("/", 1)[-1], options.trainer.rsplit("/", 1)[-1])
        files.write_text(options.html, write_rollout_page(found, names, origin))
    if options.json:
        findings = [{**asdict(one), "remedy": one.remedy} for one in found.findings]
        say_json(
            {
                "provenance": origin,
                "equal": found.equal,
                "cause": found.cause,
                **asdict(found),
                "findings": findings,
            }
        )
    else:
        show(make_console(140, soft_wrap=True), found, options.limit)
    return found.exit_code


def show(console: Console, found: RolloutReport, limit: int) -> None:
    """Print findings, metrics, notes and the verdict."""
    shown = found.findings[:limit] if limit > 0 else found.findings
    for one in shown:
        share = f" ({one.differ:,} of {one.of:,})" if one.of else ""
        console.print(f"{one.cause}, {one.kind}{share}: {one_line(one.detail)}")
        if one.first:
            console.print(f"  first:  {one_line(one.first)}")
        console.print(f"  remedy: {one.remedy}")
    if len(shown) < len(found.findings):
        console.print(f"… and {len(found.findings) - len(shown):,} more; --limit 0 shows all")
    if found.metrics:
        table = Table("metric", "value")
        for name, value in found.metrics.items():
            table.add_row(name, f"{value:.6g}")
        console.print(table)
    for note in found.notes:
        console.print(f"note: {one_line(note)}")
    console.print(found.sentence)
