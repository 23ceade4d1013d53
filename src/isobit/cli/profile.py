"""`isobit profile`: where a step's time goes, from traces of torch.profiler, or of a script. Does not load torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.arguments import at_least_one, check_script
from isobit.errors import ArgumentError


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile",
        description="Read traces that torch.profiler exported, one per rank, and account for every nanosecond of every "
        "step: compute, exposed communication, copies, and idle time with its reason. The parts add up to the step. "
        "Reads Chrome JSON, also gzipped, tar archives and folders, of CUDA, ROCm and CPU; needs no GPU. "
        "Two runs are compared brick by brick: the differences add up to that of the step. "
        "A script is run on --ranks processes, and --steps of its optimizer steps are recorded. "
        "With --contract, budgets of bricks are judged, and --propose writes them from a good run. "
        "Exit 0: nothing found, or compared; 1: findings; 2: could not read.",
        epilog="examples: isobit profile trace_rank0.json trace_rank1.json --html profile.html; "
        "isobit profile train.py --ranks 2 --steps 3 -- --lr 0.1 (arguments after -- are passed to the script)",
    )
    parser.add_argument(
        "traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="a trace, a tar archive or a folder of traces, one per rank of one run; or one script (.py), which is run",
    )
    add_recording(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare two runs brick by brick; this is the default for two traces, or two folders, that are not "
        "different ranks of one run",
    )
    parser.add_argument(
        "--contract",
        type=Path,
        metavar="FILE",
        help="judge the budgets in this file instead: exit 0 if all are kept, 1 if one is broken, matches nothing or "
        "could not have failed, 2 if one cannot be judged",
    )
    parser.add_argument(
        "--propose",
        type=Path,
        metavar="FILE",
        help="write a budget file that these traces keep: what was measured, with a slack of 10 %%",
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="with --contract: JUnit XML")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="with --contract: SARIF")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report of one run to this file"
    )
    parser.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="write a timeline of all ranks to this file, with causes, waits and findings, for ui.perfetto.dev",
    )


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Add the options for a script."""
    parser.add_argument(
        "--ranks", type=at_least_one, help="of a script: processes on this machine (default: 1)"
    )
    parser.add_argument(
        "--steps", type=at_least_one, help="of a script: optimizer steps to record (default: 3)"
    )
    parser.add_argument(
        "--warmup", type=at_least_one, help="of a script: optimizer steps before them (default: 3)"
    )
    parser.add_argument(
        "--modules",
        action="store_true",
        help="of a script: also record Python's functions, to list time by module; this is slower",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="of a script: write the traces to this folder"
    )


def run(options: argparse.Namespace) -> int:
    """Record a script, if one is named; profile the traces and print what they show."""
    import tempfile

    script = options.traces[0]
    if script.suffix == ".py" and len(options.traces) == 1:
        with tempfile.TemporaryDirectory() as folder:
            options.traces, notes = recorded(options, script, options.keep or Path(folder))
            return show(options, notes)
    asked = [
        name for name in ("ranks", "steps", "warmup", "modules", "keep") if getattr(options, name)
    ]
    if asked or options.passed_on or script.suffix == ".py":
        raise ArgumentError(
            expected="one script, or traces without options of a script",
            received=f"{len(options.traces)} files, --{asked[0] if asked else ''}".removesuffix(
                ", --"
            ),
            remedy="isobit profile train.py --ranks 2 --steps 3, or isobit profile trace_rank0.json trace_rank1.json",
        )
    return show(options, ())


def recorded(
    options: argparse.Namespace, script: Path, folder: Path
) -> tuple[list[Path], tuple[str, ...]]:
    """Record a script; return its traces, and what to know about the recording."""
    from isobit.profiling.recording import Recording, record

    check_script(script)
    if options.compare:
        raise ArgumentError(
            expected="--compare with two traces or folders",
            received="a script",
            remedy="record each run with --keep DIR, then: isobit profile --compare DIR DIR",
        )
    recording = Recording(
        script,
        options.passed_on,
        options.ranks or 1,
        options.steps or 3,
        options.warmup or 3,
        options.modules,
    )
    found = record(recording, folder)
    return list(found.traces), found.notes


def show(options: argparse.Namespace, notes: tuple[str, ...]) -> int:
    """Profile the traces and print what they show."""
    import json
    from dataclasses import replace

    from isobit.cli.provenance import provenance_of
    from isobit.cli.terminal import say, say_json
    from isobit.foundation.files import write_text
    from isobit.profiling.api import are_one_run, compare_profiles, profile_traces
    from isobit.profiling.report import lines_of, lines_of_comparison, write_profile_page
    from isobit.profiling.timeline import timeline_of
    from isobit.profiling.trace import read_traces

    if options.contract or options.propose:
        return judge(options)
    if options.junit or options.sarif:
        raise ArgumentError(
            expected="--junit and --sarif with --contract",
            received="no --contract",
            remedy="isobit profile trace.json --contract bricks.yaml --junit bricks.xml",
        )
    if options.compare and len(options.traces) != 2:
        raise ArgumentError(
            expected="two traces or folders to compare",
            received=f"{len(options.traces)}",
            remedy="isobit profile --compare before.json after.json",
        )
    sides = [read_traces([path]) for path in options.traces]
    every = [trace for side in sides for trace in side]
    if options.compare or (len(sides) == 2 and not are_one_run(every)):
        if options.html or options.perfetto:
            raise ArgumentError(
                expected="--html and --perfetto with the traces of one run",
                received="two runs to compare",
                remedy="use --json, or profile each run by itself with --html",
            )
        difference = compare_profiles(*(profile_traces(side) for side in sides))
        if options.json:
            origin = provenance_of(options, difference.digests)
            say_json({"provenance": origin, "comparison": difference})
        else:
            for line in lines_of_comparison(difference):
                say(line)
        return 0
    found = profile_traces(every)
    found = replace(found, notes=(*found.notes, *notes))
    origin = provenance_of(options, [rank.digest for rank in found.ranks])
    if options.html:
        write_text(options.html, write_profile_page(found, origin))
    if options.perfetto:
        write_text(options.perfetto, json.dumps(timeline_of(every)))
    if options.json:
        say_json({"provenance": origin, "profile": found})
    else:
        for line in lines_of(found):
            say(line)
    return found.exit_code


def judge(options: argparse.Namespace) -> int:
    """Judge the budgets of a file, or print a file of budgets."""
    from isobit.cli.progress import SELDOM, Steps
    from isobit.cli.provenance import provenance_of
    from isobit.cli.terminal import say, say_json
    from isobit.foundation.files import write_text
    from isobit.profiling.budgets import judge_budgets, propose, read_budgets
    from isobit.profiling.report import lines_of_budgets
    from isobit.profiling.trace import read_traces
    from isobit.report.junit_sarif import as_junit, as_sarif

    if (
        options.compare
        or options.html
        or options.perfetto
        or (options.contract and options.propose)
    ):
        raise ArgumentError(
            expected="--contract FILE or --propose FILE, alone",
            received="both, or one with --compare, --html or --perfetto",
            remedy="run isobit profile once for each",
        )
    if options.propose:
        write_text(options.propose, propose(read_traces(options.traces)))
        return 0
    budgets = read_budgets(options.contract)
    traces = read_traces(options.traces)
    with Steps("judging budgets", len(budgets.claims), every=SELDOM) as steps:
        found = judge_budgets(budgets, traces, lambda one: steps.done(f"{one.verdict} {one.claim}"))
    origin = provenance_of(options, [trace.digest for trace in traces])
    if options.junit:
        write_text(options.junit, as_junit([found], origin))
    if options.sarif:
        write_text(options.sarif, as_sarif([found], origin))
    if options.json:
        say_json({"provenance": origin, "budgets": found})
    else:
        for line in lines_of_budgets(found):
            say(line)
    return {"kept": 0, "could-not-run": 2}.get(found.verdict, 1)
