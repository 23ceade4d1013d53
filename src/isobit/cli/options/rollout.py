"""Options of `isobit rollout`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "rollout",
        help="compare a rollout's log-probabilities with a trainer's, and name what differs",
        description="Compare what a rollout engine and a trainer computed for the same tokens. Says which of semantics "
        "(ids, shift, mask, positions, temperature, truncation, normaliser), weights (by digests) or numerics differs, "
        "and prints the metrics under the names that RL frameworks log. Files are JSONL: one record per sequence with "
        "token_ids and logprobs, and optionally id, prompt_token_ids, mask, positions, rows, support, temperature, "
        "top_k, top_p, normaliser; a record with weights has digests. "
        "Exit 0: equal; 1: something differs; 2: could not read, or nothing to compare.",
        epilog="example: isobit rollout compare rollout.jsonl trainer.jsonl --html mismatch.html",
    )
    parser.add_argument("action", choices=("compare",), help="what to do")
    parser.add_argument("rollout", type=Path, help="what the engine computed: a JSONL file")
    parser.add_argument("trainer", type=Path, help="what the trainer computed: a JSONL file")
    parser.add_argument(
        "--limit",
        type=int,
        default=20,
        help="findings to print; 0 for all (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page to this file")
