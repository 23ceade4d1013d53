"""Options of `isobit certify`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from isobit.cli.contract_options import add_trust
from isobit.cli.options.reveal import numbers
from isobit.cli.progress import add_quiet

ROWS = (1, 3, 16, 64, 70, 130)
TARGETS = ("sm_80", "sm_90", "sm_100")
WORDS = {"true": True, "false": False, "none": None}


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "certify",
        help="prove that a Triton kernel computes a row in one order in all configurations, without a GPU",
        description="Compile the Triton kernels that a function launches for each target, run the compiled code on "
        "this CPU with a name for every floating-point expression, and compare the expressions of the output rows "
        "over all configurations. Equal expressions have equal bits for all float inputs on one GPU. Exit 0: one "
        "expression; 1: several, or a result that the inputs do not fix; 2: some configuration could not be judged, or "
        "without --rows, a row count up to 65,536 launches something that was not judged.",
        epilog="the function makes its inputs with torch, on the CPU, launches kernels as usual and returns what they "
        "wrote: def matmul(rows, BLOCK_M=64): ...; return out",
    )
    parser.add_argument(
        "function", metavar="FUNCTION", help="FILE.py:function or package.module:function"
    )
    parser.add_argument(
        "--rows",
        type=numbers,
        metavar="R,R…",
        help=f"row counts, passed as rows (default: {','.join(map(str, ROWS))} if the function has rows, and those "
        "that launch something else)",
    )
    parser.add_argument(
        "--vary",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=V,V…",
        help="values of another parameter of the function, such as BLOCK_M=16,64; may be given again",
    )
    parser.add_argument(
        "--target",
        type=names,
        default=list(TARGETS),
        metavar="T,T…",
        help=f"GPUs to compile for (default: {','.join(TARGETS)})",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that needs nothing else"
    )
    parser.add_argument(
        "--ptx", type=Path, metavar="DIR", help="write the PTX of every compiled kernel"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
    add_trust(parser)
    add_quiet(parser)


def names(text: str) -> list[str]:
    """Parse `sm_80,sm_90`."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(
            f"expected targets such as sm_80,sm_90, each once; received {text!r}"
        )
    return found


def setting(text: str) -> tuple[str, list[Any]]:
    """Parse `BLOCK_M=16,64`."""
    name, equals, values = text.partition("=")
    found = [value(part.strip()) for part in values.split(",")]
    if not equals or not name.isidentifier() or name == "rows" or "" in found:
        remedy = "use --rows for rows" if name == "rows" else "NAME=V1,V2"
        raise argparse.ArgumentTypeError(f"expected {remedy}; received {text!r}")
    if len({repr(one) for one in found}) != len(found):
        raise argparse.ArgumentTypeError(f"expected each value once; received {text!r}")
    return name, found


def value(text: str) -> Any:
    """Read a whole number, a number, true, false, none, or a word."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text
