"""Options of `isobit simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.progress import add_quiet
from isobit.errors import SimulationError

# Listed here because their own modules load torch; tests compare.
FAULTS = {kind.lower(): kind for kind in ("Die", "Stall", "Straggle", "Drop", "Flip", "PlantNaN")}
WATCHES = ("bits", "reads", "training", "devices")
TRAINING = (
    "buffers differ",
    "data alike",
    "differs from one worker",
    "dropout on",
    "file shared",
    "gradients differ",
    "gradients kept",
    "not updated",
    "order repeated",
    "random numbers alike",
    "start differs",
    "tensors alike",
    "update differs",
    "weights differ",
)
FINDINGS = tuple(
    sorted({*TRAINING, *(error.kind for error in SimulationError.__subclasses__())} - {"fault"})
)


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="run a torchrun script on simulated ranks, under many schedules, and name what is wrong",
        description="Run a script as torchrun would, with every rank in this process, once per seed: each seed is "
        "another schedule with other delays. Find deadlocks, mismatched collectives, orphaned work and messages, reads "
        "of pending results, flipped bits, and training in which replicas differ. Exit 0: nothing found; 1: findings; "
        "2: could not run.",
        epilog="words after -- go to the script: isobit simulate train.py --ranks 8 -- --lr 0.1",
    )
    parser.add_argument(
        "script", type=Path, help="a script that calls init_process_group; it is run"
    )
    add_schedule_options(parser)
    add_check_options(parser)
    add_recorder_option(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that needs nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
    add_quiet(parser)


def add_schedule_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for how many ranks and schedules, and which faults."""
    parser.add_argument("--ranks", type=at_least_one, default=4, help="default: %(default)s")
    parser.add_argument(
        "--seeds",
        type=at_least_one,
        default=10,
        help="schedules to try, from seed 0 (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, help="run this seed only, to replay a finding")
    parser.add_argument(
        "--faults",
        type=fault_kinds,
        default=(),
        metavar="K,K…",
        help=f"plant one per seed, out of {', '.join(FAULTS)}",
    )
    parser.add_argument(
        "--fault-calls",
        type=int,
        default=20,
        help="plant it at one of a rank's first N calls (default: 20)",
    )
    parser.add_argument(
        "--sends",
        choices=("buffered", "rendezvous"),
        default="buffered",
        help="sends like gloo's, or like NCCL's",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "xpu", "npu", "cpu"),
        default="auto",
        help="which kind of device the script finds, one per rank, served by the CPU (default: the kind that it names)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        help="real seconds of one rank's turn, after which it is reported as not returning (default: %(default)s)",
    )
    parser.add_argument(
        "--lines",
        type=at_least_one,
        metavar="N",
        help="lines of the program in one rank's turn, after which it is reported the same way (default: any number)",
    )


def add_recorder_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to write what torch's flight recorder would."""
    parser.add_argument(
        "--flight-recorder",
        type=Path,
        metavar="DIR",
        help="write each rank's calls to DIR as torch's flight recorder does, for isobit autopsy; with several seeds "
        "to DIR/seed-N",
    )


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for what is checked and reported."""
    parser.add_argument(
        "--watch",
        type=watches,
        default=WATCHES,
        metavar="W,W…",
        help=f"checks (default: {','.join(WATCHES)}; none for no checks)",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        choices=FINDINGS,
        metavar="KIND",
        help=f"a kind of finding to ignore: {', '.join(FINDINGS)}",
    )
    parser.add_argument(
        "--one-worker",
        action="store_true",
        help="compare each step with one rank of the same script",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="tolerance of that comparison (default: %(default)s)",
    )


def fault_kinds(text: str) -> tuple[str, ...]:
    """Parse `die,drop`."""
    words = text.lower().split(",")
    if not set(words) <= set(FAULTS):
        raise argparse.ArgumentTypeError(
            f"expected names out of {', '.join(FAULTS)}; received {text!r}"
        )
    return tuple(FAULTS[word] for word in words)


def watches(text: str) -> tuple[str, ...]:
    """Parse `bits,training`."""
    words = () if text == "none" else tuple(text.split(","))
    if not set(words) <= {*WATCHES, "finite"}:
        raise argparse.ArgumentTypeError(
            f"expected names out of {', '.join(WATCHES)}, finite; received {text!r}"
        )
    return words


def at_least_one(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1; received {text!r}")
    return int(text)
