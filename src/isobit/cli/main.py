"""Parses the command line and hands it to a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import isobit
from isobit.errors import IsobitError

KEPT, BROKEN, COULD_NOT_RUN = 0, 1, 2

# A module a command, imported when it is asked for: those that read files only must not wait for torch.
COMMANDS = {
    "doctor": "doctor",
    "reveal": "reveal",
    "verify": "verify",
    "chain": "chain",
    "curve": "curve",
    "simulate": "simulate",
    "status": "status",
    "lint": "lint",
    "graph": "graph",
    "explain": "explain",
    "diff": "diff",
    "new": "new",
    "replay": "replay",
    "import": "import_foreign",
}


def build_parser(names: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The commands named, with their options."""
    parser = argparse.ArgumentParser(
        prog="isobit",
        description="Bitwise-consistent training and inference for PyTorch, with the proof attached.",
        epilog="exit codes: 0 kept, 1 broken, 2 could not run",
    )
    parser.add_argument("--version", action="version", version=f"isobit {isobit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in names:
        import_module(f"isobit.cli.{COMMANDS[name]}").add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = words[:1] if words[:1] and words[0] in COMMANDS else tuple(COMMANDS)
    cut = words.index("--") if asked == ["simulate"] and "--" in words else len(words)  # the rest is a script's
    options = build_parser(asked).parse_args(words[:cut], argparse.Namespace(passed_on=words[cut + 1 :]))
    try:
        code: int = options.run(options)
    except IsobitError as error:
        print(f"isobit {options.command}: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    except OSError as error:
        print(f"isobit {options.command}: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        print(f"isobit {options.command}: stopped; what was settled before is kept", file=sys.stderr)
        return COULD_NOT_RUN
    return code


if __name__ == "__main__":
    sys.exit(main())
