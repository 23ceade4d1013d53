"""Parse the command line and run a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from isobit import __version__
from isobit.cli.terminal import PlainParser, say, say_error, stop_writing
from isobit.errors import IsobitError
from isobit.foundation.trusted_folder import guarded_path

KEPT, BROKEN, COULD_NOT_RUN = 0, 1, 2

# What a user does, and the commands for it. A command's module has its name and is imported when it is run.
GROUPS = {
    "compute": ("doctor", "families", "chain", "curve"),
    "look": ("audit", "reveal", "bits", "rollout", "twice", "profile"),
    "judge": ("certify", "check", "verify", "status", "explain", "lint", "graph", "new", "replay"),
    "guard": ("preflight", "simulate", "autopsy", "runlog"),
}
ABOUT = {
    "compute": "check this machine's kernels, and a whole model or training run",
    "look": "find which operators depend on the batch, how a kernel adds, where two runs differ, where time goes",
    "judge": "prove what compiled kernels compute; state what a kernel promises, and judge it",
    "guard": "find what goes wrong in a training run or a distributed program",
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
# Commands whose modules load torch. Their options are in other modules, so that help does not wait for torch.
LOAD_TORCH = (
    "audit",
    "certify",
    "check",
    "doctor",
    "reveal",
    "bits",
    "rollout",
    "twice",
    "chain",
    "curve",
    "simulate",
    "autopsy",
)
# `isobit gate model` and `isobit gate training` are second names of two commands.
GATES = {"model": "chain", "training": "curve"}
RUN_SCRIPTS = ("audit", "preflight", "simulate", "twice")


class MainParser(PlainParser):
    """The parser of `isobit` itself: its help lists the commands by group."""

    def format_help(self) -> str:
        """Replace argparse's flat list of commands by one list per group."""
        (commands,) = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        helps = {choice.dest: choice.help for choice in commands._choices_actions}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group, names in GROUPS.items():
            formatter.start_section(f"{group} ({ABOUT[group]})")
            shown = [name for name in names if name in helps]
            formatter.add_arguments(
                [argparse.Action([], name, metavar=name, help=helps[name]) for name in shown]
            )
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([a for a in self._actions if a is not commands])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of the named commands with their options."""
    parser = MainParser(
        prog="isobit",
        description="Bitwise-consistent training and inference for PyTorch, with the proof attached.",
        epilog="exit codes: 0 kept, 1 broken, 2 could not run.",
    )
    parser.add_argument("--version", action="version", version=f"isobit {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="command", parser_class=PlainParser
    )
    for name in names:
        folder = "isobit.cli.options" if name in LOAD_TORCH else "isobit.cli"
        import_module(f"{folder}.{name}").add_parser(commands)
    return parser


def resolve_gate(words: list[str]) -> list[str]:
    """Replace `gate model` or `gate training` by the command of that name; exit with usage for anything else."""
    parser = PlainParser(
        prog="isobit gate", description="Compare raw bits of a whole model, or of a training run."
    )
    parser.add_argument(
        "gate",
        choices=GATES,
        help="model: every layout of a batch (isobit chain); training: every layout of ranks (isobit curve)",
    )
    return [GATES[parser.parse_args(words[1:2]).gate], *words[2:]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["gate"]:
        words = resolve_gate(words)
    names = words[:1] if words[:1] and words[0] in COMMANDS else COMMANDS
    # Words after -- are options of the script that is run.
    cut = words.index("--") if names[0] in RUN_SCRIPTS and "--" in words else len(words)
    known = argparse.Namespace(passed_on=words[cut + 1 :], words=words)
    options = build_parser(names).parse_args(words[:cut], known)
    try:
        # A script starts its processes as `python script.py` would.
        with guarded_path(processes=options.command not in RUN_SCRIPTS):
            code: int = import_module(f"isobit.cli.{options.command}").run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # for example in `isobit status | head`
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
