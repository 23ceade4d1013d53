"""`isobit verify --backend`: judge isobit's own contracts on the Triton executors, without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console

from isobit.cli.contract_options import open_workspace
from isobit.contracts.workspace import Workspace
from isobit.errors import ContractError
from isobit.library.on_gpu.plans import BackendTree, BackendWorkspace, Derived, LeftOut

KINDS = ("interpreter", "machine")
REFUSED = ("subject", "thorough")  # options that a backend does not have


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


def found_on(workspace: Workspace, ids: Iterable[str]) -> list[Derived]:
    """Return what was derived of the contracts with these ids; with `isobit`, all of them."""
    assert isinstance(workspace.tree, BackendTree)
    return [workspace.tree.derived[id] for id in ids if id in workspace.tree.derived]


def summary(derived: Sequence[Derived], options: argparse.Namespace) -> dict[str, Any]:
    """Return the denominators of a backend: cases, and what was left out, with reasons."""
    return {
        "backend": options.backend,
        "target": options.target,
        "cases": sum(d.cases for d in derived),
        "cases_on_cpu": sum(d.cases_on_cpu for d in derived),
        "cases_by_contract": {d.contract.id: d.cases for d in derived if d.contract},
        "claims_not_applicable": [left for d in derived for left in d.claims_left_out],
        "parts_not_applicable": [left for d in derived for left in d.parts_left_out],
    }


def show_backend(console: Console, derived: Sequence[Derived], options: argparse.Namespace) -> None:
    """Print which backend ran, on how many cases, and by reason what has no meaning on it."""
    found = summary(derived, options)
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


def by_reason(left: Sequence[LeftOut]) -> dict[str, list[str]]:
    """Group what was left out by its reason."""
    found: dict[str, list[str]] = {}
    for one in left:
        found.setdefault(one.reason, []).append(f"{one.contract}/{one.what}")
    return found
