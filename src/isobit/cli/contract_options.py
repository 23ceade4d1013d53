"""Options and exit codes that the commands about contracts share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from isobit.contracts.store.ladder import UNSETTLED
from isobit.contracts.store.tree import Broken, library
from isobit.contracts.workspace import Workspace
from isobit.errors import ContractError
from isobit.foundation.plain_text import one_line
from isobit.foundation.trusted_folder import serve_folder

KINDS = ("interpreter", "machine")  # of backends
REFUSED = ("subject", "thorough")  # options that a backend does not have
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


def refuse_missing(words: Iterable[str]) -> None:
    """Raise for a word that can only be a path and does not exist."""
    for word in words:
        if not Path(word).exists() and ("/" in word or word.endswith((".yaml", ".yml"))):
            raise ContractError(
                expected="files or folders that exist, or ids of contracts",
                received=f"no such file: {word}",
                remedy="isobit contract status lists the contracts below a folder",
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
            remedy="isobit contract new NAME --from package:function writes one; for isobit's: isobit verify isobit",
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


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose what runs isobit's operators."""
    parser.add_argument(
        "--backend",
        choices=KINDS,
        help="run isobit's operators by their Triton executors: in Triton's interpreter, or compiled, in the PTX "
        "machine. Needs no GPU; only for isobit's own contracts; few and small cases, up to L2; evidence is apart",
    )
    parser.add_argument(
        "--target",
        default="sm_90",
        metavar="GPU",
        help="with --backend, the GPU whose arithmetic or code is run (default sm_90)",
    )


def open_chosen(options: argparse.Namespace) -> tuple[Workspace, list[str]]:
    """Open the contracts that the command line names, derived for its backend if it names one."""
    if not options.backend:
        return open_workspace(options)
    from isobit.library.on_gpu.plans import BackendTree, BackendWorkspace

    refuse_options(options)
    opened = partial(BackendWorkspace, backend=options.backend, target=options.target)
    workspace, ids = open_workspace(options, opened)
    assert isinstance(workspace.tree, BackendTree)
    derived = workspace.tree.derived
    chosen = [id for id in ids if id not in derived or derived[id].contract is not None]
    if not chosen:
        named = "; ".join(f"{id}: {derived[id].claims_left_out[0].reason}" for id in ids)
        raise ContractError(
            expected="contracts of isobit's own operators that have a Triton executor",
            received=named or ", ".join(options.which) or "the contracts below the current folder",
            remedy=f"isobit verify isobit --backend {options.backend} judges all that apply",
        )
    return workspace, chosen


def refuse_options(options: argparse.Namespace) -> None:
    """Raise for options that have no meaning with a backend."""
    for name in REFUSED:
        if getattr(options, name, None):
            raise ContractError(
                expected="isobit's own operators, on the cases that a backend is judged on",
                received=f"--{name} with --backend",
                remedy=f"leave out --{name}",
            )


@contextmanager
def on_backend(options: argparse.Namespace) -> Iterator[None]:
    """Run isobit's operators on the chosen backend, if there is one, while the context is open."""
    if not options.backend:
        yield
        return
    from isobit.certifying.running.backends import executing

    with executing(options.backend, target=options.target):
        yield
