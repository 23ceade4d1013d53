"""`isobit diagnose`: from the files that a run left to the cause. Does not load torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.guards.trial_run.report import many

if TYPE_CHECKING:
    from isobit.diagnosing.diagnosis import Diagnosis

MOST_SHOWN = 8
ONE = {
    "logs": "log",
    "events of watch": "file of events of watch",
    "texts": "text with an error",
    "traces": "set of traces",
    "folders of dumps": "folder of dumps",
    "configurations": "configuration",
}
SEVERAL = {
    "events of watch": "files of events of watch",
    "texts": "texts with an error",
    "traces": "sets of traces",
}


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "diagnose",
        description="Look into the folder of a run for traces of torch.profiler, logs, events of isobit.guards.watch, "
        "dumps of torch's flight recorder, a configuration and what the run printed; gather what profile, runlog, "
        "autopsy and preflight find in them, and errors of Python; and say which finding the others follow from: in a "
        "transfer, a kernel, a block, a rank or the training loop; local or global; static (a check before the run "
        "finds it) or dynamic. Exit 0: nothing found; 1: a cause was found; 2: nothing was found, and something, or "
        "everything, could not be read.",
        epilog="example: isobit diagnose out/run-17",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")


def run(options: argparse.Namespace) -> int:
    """Diagnose the run and print the chain from the symptom to the cause."""
    from isobit.cli.provenance import provenance_of
    from isobit.cli.terminal import say, say_json
    from isobit.diagnosing.diagnosis import diagnose
    from isobit.diagnosing.run_folder import look_into
    from isobit.errors import ArgumentError
    from isobit.guards.config_file import read_config

    files = look_into(options.folder)
    values, unreadable = {}, {}
    for path in files.configurations:
        try:
            values[path] = read_config(path, "the configuration")
        except ArgumentError as error:
            unreadable[str(path)] = str(error)
    found = diagnose(files, values)
    found.unreadable.update(unreadable)
    if options.json:
        origin = provenance_of(options, [str(options.folder)])
        say_json({"provenance": origin, "diagnosis": found})
    else:
        for line in lines_of(found, files.checkpoints, files.skipped):
            say(line)
    if found.cause is not None:
        return 1
    # "Nothing found" is said only of files that were all read.
    return 0 if found.judged and not found.unreadable else 2


def lines_of(found: Diagnosis, checkpoints: tuple[Path, ...], skipped: int) -> list[str]:
    """Return the diagnosis as lines."""
    counts = (
        f"{count} {ONE.get(kind, kind) if count == 1 else SEVERAL.get(kind, kind)}"
        for kind, count in found.judged.items()
    )
    read = ", ".join(counts) or "nothing"
    lines = [f"{found.folder}: read {read}; {many(skipped, 'other file')}"]
    if found.cause is None:
        lines.append("nothing found" if found.judged else "nothing could be judged")
    for number, one in enumerate(found.whys):
        at = "" if one.step is None else f", step {one.step}"
        place = f"{one.place}: " if one.place else ""
        head = "symptom" if number == 0 and len(found.whys) > 1 else "because"
        if number == len(found.whys) - 1:
            head = "cause"
        lines.append(f"{head}: {one.rule}{at}: {place}{one.message} ({one.source})")
    if found.cause is not None:
        lines.append(f"which granularity: {found.granularity}; {found.extent}; {found.when}")
        if found.contract:
            lines.append(f"the claim that fails on it: {found.contract}")
        lines.append(f"next: {found.next}")
        more = len({one.rule for one in found.evidence}) - len(found.whys)
        if more > 0:
            lines.append(f"{more} more kinds of findings; --json has all")
    for path, why in list(found.unreadable.items())[:MOST_SHOWN]:
        lines.append(f"not read: {path}: {why}")
    for path, why in list(found.not_judged.items())[:MOST_SHOWN]:
        lines.append(f"not judged: {path}: {why}")
    if checkpoints:
        files = many(len(checkpoints), "checkpoint file")
        are = "is" if len(checkpoints) == 1 else "are"
        lines.append(f"{files} {are} not judged: isobit compare checkpoints A B")
    return lines
