"""Options of `isobit doctor`."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="show the machine and its engines, and attest the kernels' order",
        description="Show the machine and the engine of each dtype, then reveal the order in which the loaded "
        "kernels add and compare it with the defined one. Exit 0: kept; 1: not kept, so the portable executor "
        "serves; 2: no native kernels to attest, so the portable executor serves.",
        epilog="example: isobit doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
