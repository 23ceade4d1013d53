"""Options of `isobit bits`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.progress import add_quiet


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bits",
        help="compare two checkpoints tensor by tensor, bit for bit",
        description="Compare two checkpoints: safetensors or torch.save files, folders of them with or without an "
        "index, folders of torch.distributed.checkpoint, folders per rank. Whole and sharded, fused and split, "
        "wrapped and plain names are mapped, and every mapping is reported. Nothing in a file is run. "
        "Exit 0: equal; 1: something differs; 2: could not read, or no tensor in common.",
        epilog="example: isobit bits before/model.safetensors after/",
    )
    parser.add_argument("left", type=Path, metavar="A", help="a checkpoint: a file or a folder")
    parser.add_argument("right", type=Path, metavar="B", help="the checkpoint to compare it with")
    parser.add_argument(
        "--common",
        action="store_true",
        help="compare what both have; names that only one has are listed and do not decide",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=20,
        help="rows to print per list; 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON record with every tensor's digests"
    )
    add_quiet(parser)
