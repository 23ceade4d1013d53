"""`isobit compare derived`: is a pruned, merged or quantised checkpoint what it is said to be?"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.comparing.derived.records import LEFT, STATED, Derivation
from isobit.errors import ArgumentError
from isobit.foundation.plain_text import one_line

if TYPE_CHECKING:
    from isobit.comparing.derived.records import Progress


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "derived",
        description="Check a checkpoint that was pruned, merged or quantised, tensor by tensor: the stated share of "
        "zeros (--sparsity, --n-m), the merge of a mergekit configuration (--merged-from), codes within half a step "
        "of the weights they were made from (--quantised-from). Nothing in a file is run. Exit 0: every tensor is as "
        "stated; 1: one is not, or the statement applies to no tensor; 2: could not read.",
        epilog="example: isobit compare derived pruned/ --sparsity 0.5 --n-m 2:4 --from model/",
    )
    parser.add_argument("path", type=Path, metavar="CHECKPOINT", help="a file or a folder")
    parser.add_argument(
        "--sparsity", type=share, metavar="SHARE", help="the stated share of zeros, as 0.5"
    )
    parser.add_argument(
        "--n-m",
        type=n_of_m,
        metavar="N:M",
        help="at most N of M neighbours along a row are not zero, as 2:4",
    )
    parser.add_argument(
        "--from",
        dest="base",
        type=Path,
        metavar="BASE",
        help="of a pruned checkpoint: what it was made from; kept and other weights must have its bits",
    )
    parser.add_argument(
        "--at-least", action="store_true", help="accept more zeros than --sparsity states"
    )
    parser.add_argument(
        "--updated",
        action="store_true",
        help="accept kept weights that differ from BASE, as SparseGPT's do",
    )
    parser.add_argument(
        "--targets",
        type=pattern,
        metavar="REGEX",
        help="names of pruned weights (default: weights of linear layers but embeddings and lm_head)",
    )
    parser.add_argument(
        "--ignore", type=pattern, metavar="REGEX", help="names of weights that were left out"
    )
    parser.add_argument(
        "--merged-from",
        nargs="+",
        metavar="[NAME=]MODEL",
        help="the merged models: paths that end with the configuration's names, or NAME=PATH",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="of a merge: mergekit's configuration"
    )
    parser.add_argument(
        "--quantised-from",
        type=Path,
        metavar="BASE",
        help="what a quantised checkpoint was made from",
    )
    parser.add_argument(
        "--nearest",
        action="store_true",
        help="every code must be rounded to nearest; GPTQ's are not",
    )
    parser.add_argument(
        "--limit", type=int, default=20, help="rows to print; 0 for all (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record with every tensor")
    add_quiet(parser)


def share(text: str) -> Fraction:
    """Read a share exactly, as a decimal number is written."""
    try:
        found = Fraction(text)
    except (ValueError, ZeroDivisionError):
        found = Fraction(-1)
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, received {text!r}")
    return found


def n_of_m(text: str) -> tuple[int, int]:
    """Read N:M."""
    found = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    if not found or not 0 < int(found.group(1)) < int(found.group(2)):
        raise argparse.ArgumentTypeError(f"expected N:M as 2:4, received {text!r}")
    return int(found.group(1)), int(found.group(2))


def pattern(text: str) -> re.Pattern[str]:
    """Read a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression: {error}") from None


def run(options: argparse.Namespace) -> int:
    """Check and print. The exit code is 0 if every tensor is as stated."""
    kinds = {
        "--sparsity or --n-m": options.sparsity is not None or options.n_m is not None,
        "--merged-from": bool(options.merged_from),
        "--quantised-from": options.quantised_from is not None,
    }
    if sum(kinds.values()) != 1:
        raise ArgumentError(
            expected=f"one of {', '.join(kinds)}",
            received=" and ".join(k for k, given in kinds.items() if given) or "none",
            remedy="state one thing that the checkpoint is; run again for another",
        )
    with Steps(str(options.path), quiet=options.quiet, every=SELDOM) as steps:

        def report(number: int, total: int, name: str) -> None:
            steps.expect(total)
            steps.done(name)

        found = check(options, report)
    if options.json:
        say_json(
            {
                "provenance": provenance_of(options, [repr(one) for one in found.tensors]),
                "exit": found.exit_code,
                "sentence": sentence(found),
                **asdict(found),
            }
        )
    else:
        show(make_console(140, soft_wrap=True), found, options.limit)
    return found.exit_code


def check(options: argparse.Namespace, report: Progress) -> Derivation:
    """Call the check that the options name."""
    if options.merged_from:
        from isobit.comparing.derived.merged import check_merged

        if options.config is None:
            raise ArgumentError(
                expected="--config FILE.yaml, mergekit's configuration of the merge",
                received="none",
                remedy="mergekit writes it into the merged folder as mergekit_config.yml",
            )
        return check_merged(options.path, options.merged_from, options.config, progress=report)
    if options.quantised_from is not None:
        from isobit.comparing.derived.quantised import check_quantised

        return check_quantised(
            options.path, options.quantised_from, nearest=options.nearest, progress=report
        )
    from isobit.comparing.derived.pruned import Pruning, check_pruned

    stated = Pruning(
        options.sparsity,
        options.n_m,
        options.at_least,
        options.updated,
        options.targets,
        options.ignore,
    )
    return check_pruned(options.path, stated, options.base, progress=report)


def show(console: Console, found: Derivation, limit: int) -> None:
    """Print the tensors that are wrong, notes, and the verdict."""
    console.print(f"{found.path}: {one_line(found.statement)}")
    for note in found.notes:
        console.print(f"note: {one_line(note)}")
    shown = found.wrong[:limit] if limit > 0 else found.wrong
    if shown:
        table = Table("wrong", "elements", "cause")
        for one in shown:
            table.add_row(
                one_line(one.name), f"{one.wrong:,} of {one.elements:,}", one_line(one.cause)
            )
        console.print(table)
    if len(shown) < len(found.wrong):
        console.print(
            f"… and {len(found.wrong) - len(shown):,} more; --limit 0 or --json shows all"
        )
    console.print(sentence(found))


def sentence(found: Derivation) -> str:
    """Return the verdict with its denominators."""
    counts = (
        f"{len(found.of(STATED)):,} as stated, {len(found.wrong):,} wrong, "
        f"{len(found.of(LEFT)):,} left as they were, of {len(found.tensors):,} tensors"
    )
    if found.vacuous:
        return f"NOTHING TO CHECK: the statement applies to no tensor ({counts})"
    return f"{'NOT AS STATED' if found.wrong else 'as stated'}: {counts}"
