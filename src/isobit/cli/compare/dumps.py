"""`isobit compare dumps A B`: compare dumps of two runs, and name the first and all places that differ."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.terminal import make_console, say_json
from isobit.comparing.dumps.records import ALIGNMENTS, DumpComparison, PlaceDifference

SHOWN = 20  # rows of a table and names of a list; --json has all
COMPARED = {
    "bits": "by values, bit for bit",
    "digest": "by digests of all bits",
    "hash": "by hashes",
}


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "dumps",
        description="Compare the tensors that two runs dumped: DebugMode logs, files of SGLang's dumper, or tensor "
        "files. Entries are aligned by name or by order; the first difference and all others are named. "
        "Exit 0: no difference seen; 1: the dumps differ; 2: could not read, or too little could be compared to say.",
        epilog="example: isobit compare dumps prefill.log decode.log --rows common",
    )
    parser.add_argument("left", type=Path, metavar="A", help="a dump: a file or a folder")
    parser.add_argument("right", type=Path, metavar="B", help="the dump to compare it with")
    parser.add_argument(
        "--rows",
        choices=("all", "common"),
        default="all",
        help="where one side has more rows, compare all (they differ) or the common ones (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Print what differs. The exit code is 0 if no difference was seen, 2 if too little was compared to say."""
    from isobit.comparing.dumps.compare import compare_dumps

    title = "comparing dumps"
    with Steps(title, quiet=options.quiet, every=SELDOM) as steps:
        found = compare_dumps(
            options.left,
            options.right,
            rows=options.rows,
            progress=lambda done, total: steps.at(title, done, total),
        )
    if options.json:
        say_json({"exit": found.exit_code, "first": found.first, "comparison": found})
    else:
        show(found)
    return found.exit_code


def show(found: DumpComparison) -> None:
    """Print a comparison: what was compared, the first difference, all of them, and what is left over."""
    console = make_console(118)
    show_sides(console, found)
    if found.first is not None:
        show_first(console, found.first, found.ordered)
        if found.ordered:
            show_list(console, "  without a partner just before it", found.before_first)
        show_differing(console, found.differing)
    show_left_over(console, found)
    for note in found.notes:
        console.print(f"note: {note}")
    console.print(conclusion(found))


def show_sides(console: Console, found: DumpComparison) -> None:
    """Print both dumps, how their entries were aligned, and what was compared."""
    for side, path, form, count in zip(
        ("left", "right"), (found.left, found.right), found.formats, found.entries, strict=True
    ):
        console.print(f"{side + ':':7}{path} ({form}, {count:,} entries)")
    ways = [
        f"{found.aligned[way]:,} {text}" for way, text in ALIGNMENTS.items() if way in found.aligned
    ]
    console.print(f"aligned: {found.pairs:,} pairs" + (f" ({'; '.join(ways)})" if ways else ""))
    compared = [
        f"{found.compared[how]:,} {text}" for how, text in COMPARED.items() if how in found.compared
    ]
    if found.shortened:
        compared.append(f"{found.shortened:,} of them only in the common rows")
    if found.without_values:
        compared.append(f"{found.without_values:,} pairs without anything to compare")
    console.print(f"compared: {'; '.join(compared) or 'nothing'}")


def show_first(console: Console, first: PlaceDifference, ordered: bool) -> None:
    """Print the first place that differs."""
    order = "" if ordered else " by name (files have no order)"
    console.print(f"first difference{order}: {first.left}")
    if first.right != first.left:
        console.print(f"  right: {first.right} ({ALIGNMENTS[first.alignment]})")
    console.print(f"  {first.detail}{measured(first)}")
    if first.source:
        console.print(f"  called at {first.source}")


def measured(place: PlaceDifference) -> str:
    """Return the largest distance of a place, as text to append."""
    words = []
    if place.ulps is not None:
        words.append(f"{place.ulps:,} ulp at most")
    if place.largest is not None:
        words.append(f"max |Δ| {place.largest:.3g}")
    return f"; {', '.join(words)}" if words else ""


def show_differing(console: Console, differing: Sequence[PlaceDifference]) -> None:
    """Print places that differ as a table, up to `SHOWN`."""
    kinds = Counter(place.what for place in differing)
    counts = ", ".join(f"{count:,} in {what}" for what, count in kinds.items())
    place_column = Column("place", overflow="fold")  # a name is never shortened
    table = Table(place_column, "differs in", "elements", "ulp", "max |Δ|", "aligned")
    for place in differing[:SHOWN]:
        bits = place.difference
        table.add_row(
            place.left,
            place.what if bits is not None else place.detail.partition(": the ")[0],
            f"{bits.count:,} of {bits.total:,}" if bits and bits.count and bits.total else "",
            "" if place.ulps is None else f"{place.ulps:,}",
            "" if place.largest is None else f"{place.largest:.3g}",
            place.alignment,
        )
    console.print(f"places that differ: {len(differing):,} ({counts})")
    console.print(table)
    if len(differing) > SHOWN:
        console.print(f"  and {len(differing) - SHOWN:,} more; --json lists all")


def show_left_over(console: Console, found: DumpComparison) -> None:
    """Print what was not compared, has no partner, or could not be read."""
    reasons = [
        f"{one.left}: {one.reason}"
        if one.left == one.right
        else f"{one.left} / {one.right}: {one.reason}"
        for one in found.not_compared
    ]
    show_list(console, "aligned, but not compared", reasons)
    show_list(console, "only in the left dump", found.only_left)
    show_list(console, "only in the right dump", found.only_right)
    show_list(console, "unreadable", [f"{one.where}: {one.reason}" for one in found.unreadable])


def show_list(console: Console, title: str, names: Sequence[str]) -> None:
    """Print names, up to `SHOWN`, after their count."""
    if not names:
        return
    console.print(f"{title}: {len(names):,}")
    for name in names[:SHOWN]:
        console.print(f"  {name}")
    if len(names) > SHOWN:
        console.print(f"  and {len(names) - SHOWN:,} more; --json lists all")


def conclusion(found: DumpComparison) -> str:
    """Return the result as one sentence."""
    lone = len(found.only_left) + len(found.only_right)
    partners = f"; {lone:,} entries have no partner" if lone else ""
    compared = sum(found.compared.values())
    if found.differing:
        shapes = sum(place.what == "shape" for place in found.differing)
        text = f"the dumps differ at {len(found.differing):,} of {found.pairs:,} aligned places"
        if shapes and found.rows == "all":
            text += f", {shapes:,} of them in shape alone (--rows common compares common rows)"
        return text + partners
    if not found.pairs:
        return f"nothing was aligned{partners}"
    if not compared:
        return f"nothing was compared at {found.pairs:,} aligned places{partners}"
    seen = f"no difference seen at {compared:,} of {found.pairs:,} aligned places"
    return seen + partners
