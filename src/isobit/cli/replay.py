"""`isobit replay`: judge one case of one claim again, as a broken verdict printed it."""

from __future__ import annotations

import argparse
from typing import Any

from isobit.cli.contract_options import add_trust
from isobit.cli.terminal import say
from isobit.cli.verify_backend import add_backend, on_backend, open_chosen
from isobit.contracts.options import Options
from isobit.errors import ContractError, IsobitError, in_one_line


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="run one claim again on one case",
        description="Judge CONTRACT/CLAIM on one case, or on all of its fixed cases. Exit codes: 0: kept; 1: broken.",
        epilog="isobit verify prints the command for each broken claim",
    )
    parser.add_argument("claim", metavar="CONTRACT/CLAIM")
    parser.add_argument("--case", default="", help="the case, as the verdict printed it")
    parser.add_argument("--subject", default="", metavar="NAME|CODE", help="judge other code")
    parser.add_argument(
        "--file", metavar="PATH", help="the contract's file (default: found by its id)"
    )
    parser.add_argument("--evidence", metavar="DIR", help=argparse.SUPPRESS)
    add_backend(parser)
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Judge the case, and print the counts and the first difference."""
    from isobit.contracts.judge.bound import named_function
    from isobit.contracts.judge.cases import replay
    from isobit.contracts.store.sources import is_interpreted
    from isobit.library.any_kernel.kernel_run import running_kernels

    id, _, name = options.claim.partition("/")
    options.which = [options.file] if options.file else [id]  # isobit's own ids are always known
    workspace, _ = open_chosen(options)
    contract = workspace.tree.load(workspace.tree.find(id).id)
    claim = next((c for c in contract.claims if c.id == name), None)
    if claim is None:
        known = ", ".join(c.id for c in contract.claims)
        raise ContractError(
            expected=f"a claim of {id}: {known}",
            received=name or "none",
            remedy="write it as CONTRACT/CLAIM",
        )
    judged = Options(trusted=tuple(options.trust), subject=options.subject)
    try:
        if options.subject and not is_interpreted():  # its Triton kernels run as in `isobit check`
            with running_kernels("cpu", options.target) as how:
                how.attempt(lambda: named_function(contract, judged))
                tally = how.attempt(lambda: replay(contract, claim, judged, options.case))
        else:
            with on_backend(options):
                tally = replay(contract, claim, judged, options.case)
    except IsobitError:
        raise
    except (Exception, SystemExit) as error:
        raise ContractError(
            expected="code that runs",
            received=f"{type(error).__name__}: {in_one_line(error)}",
            remedy="fix the code that the claim names",
        ) from None
    say(
        f"{options.claim}: {tally.differing:,} of {tally.compared:,} differ, {tally.inputs:,} inputs"
    )
    if tally.differing:
        say(tally.first)
    return 0 if tally.compared and not tally.differing else 1
