"""Options of `isobit audit --server`."""

from __future__ import annotations

import argparse
from pathlib import Path

from isobit.comparing.server.report import AXES

ASKED_AT_MOST = 4096  # tokens, prompts and repeats: what a slip of the finger should not exceed


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options for a server that is audited through its API."""
    group = parser.add_argument_group(
        "a server",
        "Ask a server with OpenAI's completions API the same in several ways, and compare the log-probabilities that "
        f"it returns with those of each prompt alone. Axes of --vary: {', '.join(AXES)} (default: all). "
        "--inputs, --shape (default: 16x160, words) and --seed choose the prompts. "
        "Exit 0: no difference; 1: some; 2: could not ask, or an axis was not judged.",
    )
    group.add_argument("--server", metavar="URL", help="such as http://localhost:8000")
    group.add_argument("--model", dest="served", metavar="NAME", help="the model's name there")
    group.add_argument(
        "--tokens", type=count, default=16, help="to ask for after each prompt (default: 16)"
    )
    group.add_argument(
        "--top",
        type=count_or_zero,
        default=5,
        help="of the most likely tokens, compare so many (default: 5)",
    )
    group.add_argument("--repeats", type=count, default=3, help="of each prompt alone (default: 3)")
    group.add_argument(
        "--timeout", type=seconds, default=60.0, help="seconds for a request (default: 60)"
    )
    group.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="has the API key (default: the environment variable OPENAI_API_KEY, if set)",
    )


def count_or_zero(text: str) -> int:
    """Read a number of things."""
    if not text.isascii() or not text.isdigit() or int(text) > ASKED_AT_MOST:
        raise argparse.ArgumentTypeError(
            f"expected a number up to {ASKED_AT_MOST:,}, received {text!r}"
        )
    return int(text)


def count(text: str) -> int:
    """Read a number of things, at least one."""
    found = count_or_zero(text)
    if not found:
        raise argparse.ArgumentTypeError("expected at least 1, received 0")
    return found


def seconds(text: str) -> float:
    """Read a time."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, received {text!r}")
    return found
