"""`isobit families`: list the model types of the installed transformers whose parts are all known."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.foundation.plain_text import one_line

if TYPE_CHECKING:
    from isobit.integrations.transformers.parts.survey import Survey


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "families",
        help="list the model types that isobit.enable takes, and what others lack",
        description="Make each causal language model of the installed transformers on the meta device, with its "
        "default config and two layers, and recognise its parts. No weights are loaded. With types, name each part and "
        "where it was recognised, or the first thing that is not known. "
        "Exit 0: all parts of the named types are known (without types: listed); 1: something is not known; "
        "2: could not run.",
        epilog="example: isobit families mistral",
    )
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="model_type of a config.json, such as mistral"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record")


def run(options: argparse.Namespace) -> int:
    """Print what is known."""
    from isobit.integrations.transformers.parts.survey import list_types, survey

    found = list(survey(options.types or list_types()))
    if options.json:
        provenance = provenance_of(options, [])
        say_json({"provenance": provenance, "types": [asdict(one) for one in found]})
    elif options.types:
        show_parts(make_console(140), found)
    else:
        show_types(make_console(140), found)
    return 0 if not options.types or all(one.known for one in found) else 1


def show_types(console: Console, found: list[Survey]) -> None:
    """Print the types that are known, and what the others lack."""
    known = [one.type for one in found if one.known]
    console.print(f"{len(known)} of {len(found)} types: all parts known, with the default config")
    console.print("  " + ", ".join(known))
    table = Table("type", "what is not known", box=None, pad_edge=False)
    for one in found:
        if not one.known:
            table.add_row(one.type, one_line(one.missing)[:200])
    console.print(table)


def show_parts(console: Console, found: list[Survey]) -> None:
    """Print each part of the types, and where it was recognised."""
    for one in found:
        console.print(f"{one.type}: {one.model}: {'all parts known' if one.known else 'not known'}")
        if not one.known:
            console.print(f"  {one_line(one.missing)}")
            continue
        table = Table(
            "part", "class", "modules", "first", "recognised by", box=None, pad_edge=False
        )
        for row in one.rows:
            table.add_row(row.part, row.kind, str(row.count), row.example, row.found)
        console.print(table)
