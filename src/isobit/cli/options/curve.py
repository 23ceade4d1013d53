"""Options of `isobit curve`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.dtypes import long_dtype
from isobit.cli.progress import add_quiet

# Listed here because their own modules load torch; a test compares.
WORKLOADS = ("small", "tiny", "whole")
DTYPES = ("bfloat16", "float32")
TRANSPORTS = ("simulator", "gloo")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "curve",
        help="train one model in every layout of ranks and micro-batches, and compare raw bits",
        description="Train a Qwen3-architecture model with AdamW and clipping on a global batch of unequal samples: "
        "data-parallel ranks × micro-batches × tensor-parallel ranks, DDP and FSDP2, in the simulator or as processes "
        "under torchrun. Every layout must give the same loss curve and the same digests of weights, gradients and "
        "optimizer. Exit 0: kept; 1: broken; 2: could not run.",
    )
    parser.add_argument(
        "--workload", default="small", choices=WORKLOADS, help="default: %(default)s"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["float32"],
        type=long_dtype(*DTYPES),
        metavar="fp32|bf16",
        help="default: fp32",
    )
    parser.add_argument(
        "--transport", default="simulator", choices=TRANSPORTS, help="default: %(default)s"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="[ENGINE:]DATAxMICROxTENSOR",
        help="these, instead of the whole grid",
    )
    parser.add_argument(
        "--stock", action="store_true", help="also run stock PyTorch, in the same layouts"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="write outcomes to it, and go on where it stopped"
    )
    parser.add_argument("--picture", type=Path, metavar="SVG", help="draw how far losses differ")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON record instead of a table"
    )
    add_quiet(parser)
