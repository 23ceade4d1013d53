"""`isobit compare checkpoints`: compare two checkpoints tensor by tensor, bit for bit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.comparing.checkpoints.records import Comparison, TensorResult
from isobit.foundation.plain_text import one_line
from isobit.foundation.records import Difference

T = TypeVar("T")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "checkpoints",
        description="Compare two checkpoints: safetensors or torch.save files, folders of them with or without an "
        "index, folders of torch.distributed.checkpoint, folders per rank. Whole and sharded, fused and split, "
        "wrapped and plain names are mapped, and every mapping is reported. Nothing in a file is run. "
        "Exit 0: equal; 1: something differs; 2: could not read, or no tensor in common.",
        epilog="example: isobit compare checkpoints before/model.safetensors after/",
    )
    parser.add_argument(
        "left", metavar="A", help="a checkpoint: a file, a folder, or an address (s3://…)"
    )
    parser.add_argument("right", metavar="B", help="the checkpoint to compare it with")
    parser.add_argument(
        "--common",
        action="store_true",
        help="compare what both have; names that only one has are listed and do not decide",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=20,
        help="rows to print per list; 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        help="tensors that are compared at a time (default: one per processor, at most 8)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON record with every tensor's digests"
    )
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Compare and print. The exit code is 0 if equal, 1 if something differs, 2 if nothing was compared."""
    from isobit.comparing.checkpoints.compare import compare_checkpoints

    title = f"{options.left} and {options.right}"
    with Steps(title, quiet=options.quiet, every=SELDOM) as steps:

        def report(number: int, total: int, name: str) -> None:
            steps.expect(total)
            steps.done(name)

        found = compare_checkpoints(
            options.left,
            options.right,
            common_only=options.common,
            digests=options.json,
            threads=options.threads,
            progress=report,
        )
    if options.json:
        say_json(
            {
                "provenance": provenance_of(options, [d for t in found.tensors for d in t.digests]),
                "equal": found.equal,
                "tensors_compared": len(found.tensors),
                "tensors_differ": len(found.differing),
                "elements": found.elements,
                "elements_differ": found.elements_differ,
                "bytes": found.bytes,
                "mappings": found.mappings,
                **asdict(found),
            }
        )
    else:
        show(make_console(140, soft_wrap=True), found, options.limit)
    return found.exit_code


def show(console: Console, found: Comparison, limit: int) -> None:
    """Print the tensors that differ, what only one checkpoint has, every mapping, and the verdict."""
    console.print(f"A: {found.paths[0]} ({found.kinds[0]})")
    console.print(f"B: {found.paths[1]} ({found.kinds[1]})")
    for mapping, count in found.mappings.items():
        console.print(f"mapped, {count} tensors: {mapping}")
    for note in found.notes:
        console.print(f"note: {one_line(note)}")
    for tie in found.ties:
        console.print(f"tied: {one_line(tie.name)} is {one_line(tie.kept)}, by {tie.shown_by}")
    if found.differing:
        table = Table("differs", "elements", "first at", "A", "B", "ulps", "max |Δ|")
        for one in first(found.differing, limit):
            table.add_row(one_line(one.name), *cells(one))
        console.print(table)
        say_rest(console, found.differing, limit)
    for value in first(found.values_differ, limit):
        texts = f"{one_line(value.left)} and {one_line(value.right)}"
        console.print(f"value differs: {one_line(value.name)}: {texts}")
    say_rest(console, found.values_differ, limit)
    for word, names in (("A", found.only_left), ("B", found.only_right)):
        for name in first(names, limit):
            console.print(f"only in {word}: {one_line(name)}")
        say_rest(console, names, limit)
    console.print(sentence(found))


def cells(one: TensorResult) -> tuple[str, ...]:
    """Return the cells of a tensor that differs."""
    found = one.difference
    assert isinstance(found, Difference)
    largest = "-" if one.largest is None else f"{one.largest:.3g}"
    if found.what != "bits":
        return found.what, "-", found.left, found.right, "-", largest
    share = f"{found.count:,} of {found.total:,}"
    ulps = "-" if found.ulps is None else f"{found.ulps:,}"
    return share, str(list(found.index or ())), found.left, found.right, ulps, largest


def first(items: Sequence[T], limit: int) -> Sequence[T]:
    """Return what is printed of a list."""
    return items[:limit] if limit > 0 else items


def say_rest(console: Console, items: Sequence[object], limit: int) -> None:
    """Print how many are left out."""
    if 0 < limit < len(items):
        console.print(f"… and {len(items) - limit:,} more; --limit 0 or --json shows all")


def sentence(found: Comparison) -> str:
    """Return the verdict with its denominators."""
    alone = f"only in A {len(found.only_left):,}, only in B {len(found.only_right):,}"
    if not found.tensors:
        return f"no tensor in common ({alone}): nothing was compared"
    if found.common_only:
        alone += " (left out of the verdict)"
    return (
        f"{'equal' if found.equal else 'DIFFER'}: {len(found.differing):,} of {len(found.tensors):,} tensors differ, "
        f"{found.elements_differ:,} of {found.elements:,} elements, {found.bytes:,} bytes compared; "
        f"{len(found.values_differ):,} of {found.values:,} values differ; {alone}"
    )
