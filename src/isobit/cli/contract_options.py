"""Options and exit codes that the commands about contracts share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console

from isobit.contracts.store.ladder import UNSETTLED
from isobit.contracts.store.tree import Broken, library
from isobit.contracts.workspace import Workspace
from isobit.errors import ContractError
from isobit.foundation.plain_text import one_line
from isobit.foundation.trusted_folder import serve_folder

FEW = 40  # the most rows that are shown
LIBRARY = "isobit"  # among ids and paths: the contracts of isobit's own operators


def add_place(
    parser: argparse.ArgumentParser, what: str = "ids of contracts, or files and folders"
) -> None:
    """Add the options for which contracts, and where their evidence is."""
    parser.add_argument(
        "which",
        nargs="*",
        metavar="ID|PATH",
        help=f"{what}; isobit for its own (default: all below the current folder)",
    )
    parser.add_argument(
        "--evidence", metavar="DIR", help="where evidence is kept (default: .isobit here)"
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option for whose code may be imported."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package whose code contracts may name; it is imported, also from the current folder (isobit always is)",
    )


def refuse_missing(words: Iterable[str]) -> None:
    """Raise for a word that can only be a path and does not exist."""
    for word in words:
        if not Path(word).exists() and ("/" in word or word.endswith((".yaml", ".yml"))):
            raise ContractError(
                expected="files or folders that exist, or ids of contracts",
                received=f"no such file: {word}",
                remedy="isobit status lists the contracts below a folder",
            )


def is_place(word: str) -> bool:
    """Return whether a word is a file or folder, and not the word for isobit's own contracts."""
    return word != LIBRARY and Path(word).exists()


def open_workspace(
    options: argparse.Namespace, opened: Callable[[list[Path], Path], Workspace] = Workspace
) -> tuple[Workspace, list[str]]:
    """Open the contracts that the command line names: existing paths, and otherwise ids."""
    serve_folder(getattr(options, "trust", ()))
    refuse_missing(options.which)
    paths = [Path(word) for word in options.which if is_place(word)]
    ids = [word for word in options.which if not is_place(word)]
    if LIBRARY in ids:
        ids.remove(LIBRARY)
        paths.append(library())
    folders = paths or [Path()]
    home = Path(options.evidence) if options.evidence else Path(".isobit")
    workspace = opened(folders, home)
    if not workspace.tree.chosen and not workspace.tree.broken and not ids:
        raise ContractError(
            expected="contract.yaml or *.contract.yaml files",
            received=f"none below {', '.join(str(f) for f in folders)}",
            remedy="isobit new NAME --from package:function writes one; for isobit's own: isobit verify isobit",
        )
    chosen = [*ids, *(workspace.tree.chosen if paths else [])]
    return workspace, chosen


def invalid_that_count(options: argparse.Namespace, workspace: Workspace) -> list[Broken]:
    """Return the invalid files among what was asked for: all below a named place; of ids, those with the same id."""
    ids = [word for word in options.which if word != LIBRARY and not is_place(word)]
    if len(ids) < len(options.which) or not ids:
        return workspace.tree.broken
    named = re.compile(rf"\b(?:{'|'.join(map(re.escape, ids))})(?![\w-])")
    return [one for one in workspace.tree.broken if named.search(str(one.error))]


def show_invalid(console: Console, workspace: Workspace, counting: Sequence[Broken]) -> None:
    """Print the contract files that are not valid, and the evidence that does not count."""
    for broken in workspace.tree.broken[:FEW]:
        if broken in counting:
            console.print(f"INVALID {broken.error}", markup=False)
        else:
            text = one_line(str(broken.error))
            console.print(f"warning: another file is not valid: {text}", markup=False)
    for name, reason in list(workspace.evidence.refused.items())[:FEW]:
        console.print(f"evidence that does not count, {reason}: {name}")


def exit_code(verdicts: Iterable[str]) -> int:
    """Return 0 if all are kept, 2 if the others could not run or were not judged, else 1."""
    found = set(verdicts)
    if found == {"kept"}:
        return 0
    return 2 if found and found <= {"kept", *UNSETTLED} else 1
