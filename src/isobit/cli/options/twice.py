"""Options of `isobit twice`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.options.simulate import at_least_one
from isobit.cli.progress import add_quiet


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "twice",
        help="run a training script twice and name the first difference and its cause",
        description="Run a script twice in fresh processes, with the same interpreter, environment and arguments, and "
        "compare every operator's results, losses, gradients, parameters and optimizer state, bit for bit. If they "
        "differ, name step, tensor and operator, and run the script again with one suspect fixed at a time (seeds, "
        "PYTHONHASHSEED, clocks, threads). Exit 0: equal; 1: the runs differ; 2: could not run.",
        epilog="words after -- go to the script: isobit twice train.py --steps 10 -- --lr 0.1",
    )
    parser.add_argument("script", type=Path, help="a script that trains; it is run")
    parser.add_argument(
        "--steps",
        type=at_least_one,
        default=5,
        help="optimizer steps after which each run ends (default: %(default)s)",
    )
    parser.add_argument(
        "--causes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the script again to find the cause",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "xpu", "npu", "cpu"),
        default="auto",
        help="which kind of device the script finds, served by the CPU, with torchrun's variables for one rank "
        "(default: the kind that it names, if this machine lacks it and the script does not ask whether it is there)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that needs nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")
    add_quiet(parser)
