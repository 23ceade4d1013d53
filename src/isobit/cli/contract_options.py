"""What commands about contracts share: which files, whose code, which evidence, which exit code."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from isobit.contracts.store.ladder import UNSETTLED
from isobit.contracts.store.tree import library
from isobit.contracts.workspace import Workspace
from isobit.errors import ContractError
from isobit.trusted_folder import serve_folder

LIBRARY = "isobit"  # among ids and paths: the contracts of isobit's own operators


def add_place(
    parser: argparse.ArgumentParser, what: str = "ids of contracts, or files and folders"
) -> None:
    """Which contracts, and where their evidence is."""
    said = f"{what}; isobit for its own (default: all below here)"
    parser.add_argument("which", nargs="*", metavar="ID|PATH", help=said)
    parser.add_argument(
        "--evidence", metavar="DIR", help="where evidence is kept (default: .isobit here)"
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Whose code may be imported."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package whose code contracts may name; it is imported, also from the current folder (isobit always is)",
    )


def refuse_missing(words: Iterable[str]) -> None:
    """A word that can only be a path names something that exists."""
    for word in words:
        if not Path(word).exists() and ("/" in word or word.endswith((".yaml", ".yml"))):
            raise ContractError(
                expected="files or folders that exist, or ids of contracts",
                received=f"no such file: {word}",
                remedy="isobit status lists the contracts below a folder",
            )


def is_place(word: str) -> bool:
    """A file or folder, and not the word that means the library."""
    return word != LIBRARY and Path(word).exists()


def open_workspace(options: argparse.Namespace) -> tuple[Workspace, list[str]]:
    """The contracts that were asked for: what exists as a path is one, the rest are ids."""
    serve_folder(getattr(options, "trust", ()))
    refuse_missing(options.which)
    paths = [Path(word) for word in options.which if is_place(word)]
    ids = [word for word in options.which if not is_place(word)]
    if LIBRARY in ids:
        ids.remove(LIBRARY)
        paths.append(library())
    folders = paths or [Path()]
    home = Path(options.evidence) if options.evidence else Path(".isobit")
    workspace = Workspace(folders, home)
    if not workspace.tree.chosen and not workspace.tree.broken and not ids:
        raise ContractError(
            expected="contract.yaml or *.contract.yaml files",
            received=f"none below {', '.join(str(f) for f in folders)}",
            remedy="isobit new NAME --from package:function writes one; for isobit's own: isobit verify isobit",
        )
    chosen = [*ids, *(workspace.tree.chosen if paths else [])]
    return workspace, chosen


def exit_code(verdicts: Iterable[str]) -> int:
    """0 if all are kept, 2 if some could not run or were not judged and none is worse, else 1. Nothing is not kept."""
    found = set(verdicts)
    if found == {"kept"}:
        return 0
    return 2 if found and found <= {"kept", *UNSETTLED} else 1
