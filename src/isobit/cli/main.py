"""Parses the command line and hands it to a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import isobit
from isobit.cli.terminal import PlainParser, say, say_error, stop_writing
from isobit.errors import IsobitError
from isobit.trusted_folder import guarded_path

KEPT, BROKEN, COULD_NOT_RUN = 0, 1, 2

# The module of each command, imported when it is run.
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
    "new": "new",
    "replay": "replay",
}
# Their modules load torch; their options have modules of their own, so that help and mistakes do not wait for it.
LOAD_TORCH = ("doctor", "reveal", "chain", "curve", "simulate")


def build_parser(names: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The commands named, with their options."""
    parser = PlainParser(
        prog="isobit",
        description="Bitwise-consistent training and inference for PyTorch, with the proof attached.",
        epilog="exit codes: 0 kept, 1 broken, 2 could not run",
    )
    parser.add_argument("--version", action="version", version=f"isobit {isobit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in names:
        folder = "isobit.cli.options" if name in LOAD_TORCH else "isobit.cli"
        import_module(f"{folder}.{COMMANDS[name]}").add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = words[:1] if words[:1] and words[0] in COMMANDS else tuple(COMMANDS)
    cut = (
        words.index("--") if asked == ["simulate"] and "--" in words else len(words)
    )  # the rest is a script's
    known = argparse.Namespace(passed_on=words[cut + 1 :], words=words)
    options = build_parser(asked).parse_args(words[:cut], known)
    try:
        # A simulated script starts its processes as `python script.py` would.
        with guarded_path(processes=options.command != "simulate"):
            code: int = import_module(f"isobit.cli.{COMMANDS[options.command]}").run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `isobit status | head`
        stop_writing()
        return COULD_NOT_RUN
    except (IsobitError, OSError) as error:
        say_error(options.command, error)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        say(f"isobit {options.command}: stopped; what was settled before is kept", sys.stderr)
        return COULD_NOT_RUN
    return code


if __name__ == "__main__":  # the current folder was on the search path when the imports above ran
    say("isobit: run isobit, or python -m isobit", sys.stderr)
    sys.exit(COULD_NOT_RUN)
