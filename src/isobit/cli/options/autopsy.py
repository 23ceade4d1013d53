"""Options of `isobit autopsy`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "autopsy",
        help="explain a hang from the dumps of torch's flight recorder: which ranks did not join which call",
        description="Read the files that torch's flight recorder wrote when a job hung, pickles or JSON, one per rank. "
        "Line up the calls of all ranks, and name the ranks that did not join, or the first call on which ranks "
        "disagree, with stacks. Lines of NCCL's watchdog and output of py-spy in the folder are repeated. No file is "
        "executed: pickles may hold plain data only. Exit 0: no call is in progress; 1: a hang or a mismatch; 2: no "
        "dump could be read.",
    )
    parser.add_argument("folder", type=Path, help="a folder with the files of all ranks")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that needs nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")
