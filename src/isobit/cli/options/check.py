"""Options of `isobit check`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.dtypes import SHORT, long_dtype
from isobit.cli.progress import add_quiet
from isobit.library.any_kernel.signatures import LIKE

TARGET = "sm_90"
CONFIGURATIONS = 8

# How each is called. Listed here because their own modules load torch; a test compares.


def named_sizes(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse NAME=SIZE,SIZE."""
    name, _, rest = text.partition("=")
    try:
        sizes = tuple(int(size) for size in rest.replace("_", "").split(","))
    except ValueError:
        sizes = ()
    if not name.isidentifier() or not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"expected NAME=SIZE,SIZE as n=4096,32768, received {text}"
        )
    return name, sizes


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="judge any kernel: is it accurate, and independent of the batch, forward and backward?",
        description="Judge a function that computes a known operator: rows do not depend on their batch, storage and "
        "threads change nothing, output and gradients are within the error of any order of addition. Nothing asks "
        "for isobit's own bits. Exit 0: all kept; 1: something is broken; 2: it could not be called.",
        epilog="called as: " + "; ".join(LIKE.values()),
    )
    parser.add_argument(
        "code",
        metavar="CODE",
        help="package.module:name or FILE.py:name, of a function or module; it is imported, also from here",
    )
    parser.add_argument("--like", required=True, choices=sorted(LIKE), help="what it computes")
    parser.add_argument(
        "--dtype",
        action="append",
        type=long_dtype(*SHORT),
        metavar="DTYPE",
        help="judge this dtype only; may be given again (default: fp32, bf16 and fp16)",
    )
    parser.add_argument(
        "--with",
        dest="named",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of the call, or of a class's constructor, as eps=1e-6; may be given again",
    )
    parser.add_argument(
        "--forward-only",
        action="store_true",
        help="judge the output alone, for kernels without a backward",
    )
    parser.add_argument(
        "--device", default="cpu", help="where inputs are when the kernel is called (default cpu)"
    )
    parser.add_argument(
        "--target",
        default=TARGET,
        metavar="GPU",
        help=f"the GPU that Triton kernels are compiled for when they run without one (default {TARGET})",
    )
    parser.add_argument(
        "--sizes",
        action="append",
        default=[],
        type=named_sizes,
        metavar="NAME=SIZE[,SIZE]",
        help="judge at these sizes of a name instead of the listed ones, as n=4096,32768; may be given again",
    )
    parser.add_argument(
        "--quick", action="store_true", help="judge at a few small sizes, for a first answer"
    )
    parser.add_argument(
        "--claims",
        action="extend",
        default=[],
        type=lambda text: [name for name in text.split(",") if name],
        metavar="NAME[,NAME]",
        help="judge these claims only, as rows,accuracy; may be given again",
    )
    parser.add_argument(
        "--configurations",
        type=int,
        default=CONFIGURATIONS,
        metavar="N",
        help="how many configurations of each autotuned kernel are compared when it runs without a GPU "
        f"(default {CONFIGURATIONS})",
    )
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="another package that CODE takes the function from",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write one page with every claim")
    add_quiet(parser)
