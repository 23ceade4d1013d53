"""Options of `isobit reveal`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.contract_options import add_trust
from isobit.cli.dtypes import short_dtype
from isobit.cli.progress import add_quiet

# Listed here because their own modules load torch; a test compares.
STOCK = (
    "sum",
    "mean",
    "linear",
    "matmul",
    "mm",
    "bmm",
    "input_grad",
    "weight_grad",
    "bias_grad",
    "rms_norm",
    "layer_norm",
    "softmax",
    "log_softmax",
    "attention",
    "embedding_grad",
)
OURS = ("linear", "frozen", "input_grad", "weight_grad", "bias_grad")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "reveal",
        help="show the order in which a kernel adds, and whether its configurations share it",
        description="Reveal the order of addition of one sum in every given configuration by probing, and the "
        "arithmetic of each addition; replay both on random terms, bit for bit, and compare configurations. "
        "Exit 0: one order; 1: several; 2: some order could not be shown.",
        epilog=f"targets: {', '.join(STOCK)}, all_reduce (gloo, one process per rank), or package.module:name, a "
        "callable that sums a vector (or takes k, m, n, dtype and returns a target of isobit.reveal.targets)",
    )
    parser.add_argument("target", help="what to probe: a name below, or package.module:name")
    parser.add_argument("--k", type=int, default=1024, help="terms of the sum (default 1024)")
    parser.add_argument(
        "--m", type=numbers, default=[], metavar="M,M…", help="row counts, each a configuration"
    )
    parser.add_argument("--n", type=int, help="columns of a product (default: as many as terms)")
    parser.add_argument(
        "--row", type=int, help="the row to read (default 0; of isobit's all are checked)"
    )
    parser.add_argument(
        "--threads", type=numbers, default=[], metavar="T,T…", help="thread counts, likewise"
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes of all_reduce (default 4)")
    parser.add_argument(
        "--elements", type=int, default=64, help="elements that all_reduce reduces (default 64)"
    )
    parser.add_argument(
        "--dtype", type=short_dtype, default="fp32", metavar="fp32|bf16|fp16", help="default: fp32"
    )
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--stock", action="store_true", help="PyTorch's own (default)")
    whose.add_argument("--isobit", action="store_true", help=f"ours: {', '.join(OURS)}")
    parser.add_argument(
        "--order-only", action="store_true", help="do not probe and replay the arithmetic"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that needs nothing else"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture alone")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
    add_trust(parser)
    add_quiet(parser)


def numbers(text: str) -> list[int]:
    """Parse `1,2,8`."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers like 1,2,8; received {text!r}"
        ) from None
    if any(number < 1 for number in found):
        raise argparse.ArgumentTypeError(f"expected numbers from 1; received {text!r}")
    return found
