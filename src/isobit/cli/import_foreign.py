"""`isobit import`: rewrites prose contracts of another form in ours, to be bound; nothing in them counts as checked."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit import files
from isobit.cli.terminal import say
from isobit.contracts.foreign import read_foreign, to_ours
from isobit.contracts.language.yaml_text import MAX_BYTES
from isobit.errors import ContractError
from isobit.plain_text import one_line


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "import",
        help="rewrite prose contracts in this language",
        description="Reads contracts whose tests are prose, says how many of their obligations are executable, and "
        "with --to writes them in our form with the prose kept as text: unbound until claims are added. Exit 0: all "
        "were read; 1: some were refused.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--to", type=Path, metavar="DIR", help="write there")


def run(options: argparse.Namespace) -> int:
    """A line a file, then the totals."""
    refused = obligations = executable = 0
    for path in options.files:
        try:
            found = read_foreign(files.read_bytes(path, MAX_BYTES).decode("utf-8"), str(path))
        except (ContractError, OSError, UnicodeDecodeError) as error:
            refused += 1
            say(one_line(f"REFUSED {error}"))
            continue
        obligations += len(found.obligations)
        executable += found.executable
        say(
            f"{found.id}: {found.executable} of {len(found.obligations)} obligations executable: unbound"
        )
        if options.to:
            options.to.mkdir(parents=True, exist_ok=True)
            files.write_text(options.to / f"{found.id}.contract.yaml", to_ours(found))
    total = len(options.files)
    say(
        f"{total - refused} of {total} read; {executable} of {obligations} obligations executable; 0 are a pass"
    )
    return 1 if refused else 0
