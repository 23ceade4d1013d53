"""Options of `isobit doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from isobit.cli.progress import add_quiet


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="show the machine and its engines, and attest the kernels' order",
        description="Show the machine and the engine of each dtype, then reveal the order in which the loaded "
        "kernels add and compare it with the defined one. Exit 0: kept; 1: not kept, so the portable executor "
        "serves; 2: no native kernels to attest, so the portable executor serves.",
        epilog="examples: isobit doctor --json; isobit doctor --device cuda --record card.json; "
        "isobit doctor --device sm_90 --operators rms_norm linear",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="attest the GPU executors instead: cuda or cuda:1 on a card, or a target such as sm_90, whose compiled "
        "code is run on this CPU. Compares the arithmetic of matrix products, every operator, and the texts of the "
        "kernels with those of the PTX machine. Exit 0: kept; 1: not kept; 2: no such device",
    )
    parser.add_argument(
        "--operators", nargs="+", metavar="NAME", help="with --device, attest only these operators"
    )
    parser.add_argument(
        "--record", metavar="FILE", help="with --device, also write the JSON record to a file"
    )
    add_quiet(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
