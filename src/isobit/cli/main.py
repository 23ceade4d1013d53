"""Parse the command line and run a command.

[Note: What help loads]
`isobit --help` and `isobit --version` import this module and little else: the tables below have a sentence per
command, and a command's module is imported when the command is named. Options of a command are in its module, whose
top imports what needs no torch; what does is imported inside of functions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from isobit import __version__
from isobit.cli.terminal import PlainParser, say, say_error, stop_writing
from isobit.errors import IsobitError
from isobit.foundation.trusted_folder import guarded_path

KEPT, BROKEN, COULD_NOT_RUN = 0, 1, 2

# What a user wants to do, and the commands for it. A command's module has its name; those of a group are in a folder.
GROUPS: dict[str, dict[str, str]] = {
    "find what differs, and where it comes from": {
        "doctor": "show this machine's engines, and attest its kernels",
        "families": "list the model types that isobit.enable takes, and what others lack",
        "audit": "name the operators that make a model depend on the batch",
        "reveal": "show the order in which a kernel adds, per configuration",
        "compare": "compare checkpoints, dumps, runs, rollouts, scores or a server's answers",
        "profile": "show where a step's time goes, from traces of torch.profiler",
    },
    "prove what kernels, models and training runs compute": {
        "certify": "prove that a Triton kernel has one order, without a GPU",
        "check": "judge any kernel: is it accurate and independent of the batch?",
        "gate": "compare bits of a model or a training run in every layout",
        "verify": "judge contracts, and keep the evidence",
        "contract": "show, explain, check, draw, write and replay contracts",
    },
    "find what is wrong with a training run or a distributed program": {
        "preflight": "run a training script's first steps and report what is wrong",
        "simulate": "run a torchrun script on simulated ranks, in many schedules",
        "autopsy": "explain a hang from the dumps of torch's flight recorder",
        "runlog": "judge a training run's log: NaN, spikes, norms, learning rates",
        "diagnose": "find the cause of a failed run from the files that it left",
    },
}
# Commands that have commands of their own.
SUBCOMMANDS: dict[str, dict[str, str]] = {
    "compare": {
        "checkpoints": "compare two checkpoints tensor by tensor, bit for bit",
        "derived": "check that a pruned, merged or quantised checkpoint is what it says",
        "dumps": "compare the tensors that two runs dumped, and name the first difference",
        "runs": "run a training script twice and name the first difference and its cause",
        "rollouts": "compare a rollout's log-probabilities with a trainer's, and name what differs",
        "scores": "test whether a model is better than another on the items of an evaluation",
        "server": "check whether a server's log-probabilities depend on what else it does",
    },
    "contract": {
        "status": "show the status of contracts from existing evidence",
        "explain": "print what a contract promises and the evidence for it",
        "lint": "check contract files without running them",
        "graph": "draw contracts and their dependencies",
        "new": "write a first contract for a function, or a first function for a contract",
        "replay": "run one claim again on one case",
    },
    "gate": {
        "model": "check that a model gives the same bits in every batch, padding, chunking and cache layout",
        "training": "train one model in every layout of ranks and micro-batches, and compare raw bits",
    },
}
# Every command that runs something, as it is written.
COMMANDS = tuple(
    " ".join((name, *sub)) if sub else name
    for names in GROUPS.values()
    for name in names
    for sub in ([(one,) for one in SUBCOMMANDS[name]] if name in SUBCOMMANDS else [()])
)
# Names of the last release, which work for one more, with a warning.
OLD_NAMES = {
    "bits": "compare checkpoints",
    "twice": "compare runs",
    "rollout": "compare rollouts",
    "chain": "gate model",
    "curve": "gate training",
    **{name: f"contract {name}" for name in SUBCOMMANDS["contract"]},
}
RUN_SCRIPTS = ("audit", "preflight", "profile", "simulate", "compare runs")


class MainParser(PlainParser):
    """The parser of `isobit` itself: its help lists the commands by group."""

    def format_help(self) -> str:
        """Replace argparse's flat list of commands by one list per group."""
        (commands,) = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group, helps in GROUPS.items():
            formatter.start_section(group)
            formatter.add_arguments(
                [argparse.Action([], name, metavar=name, help=helps[name]) for name in helps]
            )
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([a for a in self._actions if a is not commands])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def build_parser(chosen: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command line, with the options of one command, such as `compare dumps`.

    Args:
        chosen: The command. Others are known by name; their modules are not imported.
    """
    parser = MainParser(
        prog="isobit",
        description="Bitwise-consistent training and inference for PyTorch, with the proof attached.",
        epilog="exit codes: 0 kept, 1 broken, 2 could not run. isobit COMMAND --help shows options.",
    )
    parser.add_argument("--version", action="version", version=f"isobit {__version__}")
    name, _, sub = chosen.partition(" ")
    every = {name: about for names in GROUPS.values() for name, about in names.items()}
    commands = add_commands(parser, "command", every, name)
    if name in SUBCOMMANDS:
        group = commands.add_parser(name, description=f"{every[name]}.".capitalize())
        commands = add_commands(group, "subcommand", SUBCOMMANDS[name], sub)
    if chosen in COMMANDS:
        import_command(chosen).add_parser(commands)
    return parser


def add_commands(
    parser: argparse.ArgumentParser, dest: str, names: Mapping[str, str], chosen: str
) -> Any:
    """Add commands by name, except the chosen one, which is added with its options."""
    shown = dest if dest == "command" else f"{{{','.join(names)}}}"
    commands = parser.add_subparsers(
        dest=dest, required=True, metavar=shown, parser_class=PlainParser
    )
    for name, about in names.items():
        if name != chosen:
            commands.add_parser(name, help=about)
    return commands


def import_command(command: str) -> Any:
    """Import the module of a command; `compare dumps` is isobit.cli.compare.dumps."""
    return import_module(f"isobit.cli.{command.replace(' ', '.')}")


def with_new_names(words: list[str]) -> list[str]:
    """Replace a name of the last release, and warn on the error stream."""
    old, new = words[:1], ""
    rest = words[1:]
    own = rest[: rest.index("--")] if "--" in rest else rest  # the others are a script's
    if words and words[0] in OLD_NAMES:
        new = OLD_NAMES[words[0]]
        if words[0] == "rollout" and "compare" in rest:
            old = ["rollout", "compare"]
            rest.remove("compare")
    elif old == ["audit"]:
        for option, command in (("--dumps", "compare dumps"), ("--server", "compare server")):
            at = next((i for i, w in enumerate(own) if w.partition("=")[0] == option), None)
            if at is not None:
                old, new = ["audit", option], command
                _, equals, value = rest[at].partition("=")
                rest[at : at + 1] = [value] if equals else []
                break
    if not new:
        return words
    say(
        f"isobit: warning: `isobit {' '.join(old)}` is now `isobit {new}`; the old name will be removed in the "
        "next release",
        sys.stderr,
    )
    return [*new.split(), *rest]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `command` is the command as it is written, `passed_on` the arguments of a script.

    Raises:
        SystemExit: With 2 and the usage on the error stream; with 0 after `--help` and `--version`.
    """
    words = list(words)
    command = " ".join(words[:2] if words[:1] and words[0] in SUBCOMMANDS else words[:1])
    cut = words.index("--") if command in RUN_SCRIPTS and "--" in words else len(words)
    known = argparse.Namespace(passed_on=words[cut + 1 :], words=words)
    options = build_parser(command).parse_args(words[:cut], known)
    options.command = command
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    options = parse(with_new_names(list(sys.argv[1:] if arguments is None else arguments)))
    command: str = options.command
    try:
        # A script starts its processes as `python script.py` would.
        with guarded_path(processes=command not in RUN_SCRIPTS):
            code: int = import_command(command).run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # for example in `isobit contract status | head`
        stop_writing()
        return COULD_NOT_RUN
    except (IsobitError, OSError) as error:
        say_error(command, error)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        say(f"isobit {command}: stopped; what was settled before is kept", sys.stderr)
        return COULD_NOT_RUN
    return code


if __name__ == "__main__":  # the current folder was on the search path when the imports above ran
    say("isobit: run isobit, or python -m isobit", sys.stderr)
    sys.exit(COULD_NOT_RUN)
