"""`isobit autopsy`: explain a hang from the dumps of torch's flight recorder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.foundation import files
from isobit.foundation.majority import name_ranks
from isobit.foundation.plain_text import one_line
from isobit.foundation.records import to_json
from isobit.simulator.page import write_autopsy_page

if TYPE_CHECKING:
    from isobit.simulator.autopsy.examine import Autopsy, Last


FRAMES = 4  # of a stack that are printed
MOST_SHOWN = 12  # lines of each kind; --json has all


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "autopsy",
        description="Read the files that torch's flight recorder wrote when a job hung, pickles or JSON, one per rank. "
        "Line up the calls of all ranks, and name the ranks that did not join, or the first call on which ranks "
        "disagree, with stacks. Lines of NCCL's watchdog and output of py-spy in the folder are repeated. No file is "
        "executed: pickles may hold plain data only. Exit 0: the dumps of all ranks show no hang; 1: a hang or a "
        "mismatch; 2: no dump could be read, or dumps that show no hang are not those of all ranks.",
    )
    parser.add_argument("folder", type=Path, help="a folder with the files of all ranks")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="how many ranks the job had, where dumps do not record it, as those of gloo",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML report that needs nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")


def run(options: argparse.Namespace) -> int:
    """Examine the folder and print what its dumps show."""
    from isobit.simulator.autopsy.examine import examine

    found = examine(options.folder, options.ranks)
    record = as_record(options, found)
    if options.html:
        page = write_autopsy_page(json.loads(to_json(record)), record["provenance"])
        files.write_text(options.html, page)
    if options.json:
        say_json(record)
    else:
        show(make_console(118, soft_wrap=True), found)
    if found.not_judged:
        return 2
    return 0 if found.finding is None else 1


def as_record(options: argparse.Namespace, found: Autopsy) -> dict[str, Any]:
    """Return what the dumps show for JSON."""
    error, history = found.finding, found.history
    digests = [found.evidence.digests[rank] for rank in history.dumps]
    return {
        "provenance": provenance_of(options, digests),
        "finding": None
        if error is None
        else {
            "kind": error.kind,
            "ranks": list(error.ranks),
            "expected": error.expected,
            "received": error.received,
            "remedy": error.remedy,
            "stacks": {str(rank): list(lines) for rank, lines in error.stacks.items()},
            "note": error.note,
        },
        "not_judged": found.not_judged,
        "calls_in_progress": [
            {
                "call": place.call,
                "ranks": list(place.ranks),
                "missing": list(place.missing),
                "calls_differ": place.differs,
                "members_known": place.knows_members,
                "states": {str(rank): state for rank, state in place.states.items()},
            }
            for place in found.places
        ],
        "last_calls": {
            str(rank): {"call": last.call, "state": last.state, "stack": list(last.stack)}
            for rank, last in found.last.items()
        },
        "dumps": {
            str(rank): {
                "version": dump.version,
                "calls": len(dump.entries),
                "dropped": dump.dropped,
            }
            for rank, dump in history.dumps.items()
        },
        "ranks_known": history.knows_world,
        "without_dump": list(found.without_dump),
        "broken": {str(rank): reason for rank, reason in found.evidence.broken.items()},
        "skipped": found.evidence.skipped,
        "collectives": len(history.meetings),
        "logs": found.evidence.facts.lines(),
        "py_spy": {str(rank): list(s) for rank, s in found.evidence.facts.stacks.items()},
    }


def show(console: Console, found: Autopsy) -> None:
    """Print the calls in progress, the cause with stacks, and what else the folder states."""
    if found.places:
        table = Table("call in progress", "in it", "did not join")
        for place in found.places[:MOST_SHOWN]:
            nobody = "nobody" if place.knows_members else "nobody with a dump; others not recorded"
            missing = name_ranks(place.missing) if place.missing else nobody
            missing += "; the calls differ" if place.differs else ""
            table.add_row(one_line(place.call), name_ranks(place.ranks), missing)
        console.print(table)
    if found.finding is not None:
        console.print(f"{found.finding.kind}: {one_line(found.finding.one_line)}")
        show_stacks(console, found.finding.stacks)
        if found.finding.note:
            console.print(f"  note: {one_line(found.finding.note)}", markup=False)
        show_culprits(console, found)
    elif found.not_judged:
        show_last(console, found, found.last)
    facts = found.evidence.facts
    for line in facts.lines()[:MOST_SHOWN]:
        console.print(f"  {line}")
    for rank, reason in sorted(found.evidence.broken.items())[:MOST_SHOWN]:
        console.print(f"  rank {rank}: {one_line(reason)}")
    for name in found.evidence.skipped[:MOST_SHOWN]:
        console.print(f"  not used: {one_line(name)}")
    show_total(console, found)


def show_stacks(console: Console, stacks: Any) -> None:
    """Print where ranks are, those at one place together."""
    places: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in sorted(stacks.items()):
        if lines:
            places.setdefault(tuple(lines[:FRAMES]), []).append(rank)
    for place, ranks in list(places.items())[:MOST_SHOWN]:
        console.print(f"  {name_ranks(ranks)}: " + " ← ".join(map(one_line, place)))


def show_culprits(console: Console, found: Autopsy) -> None:
    """Print what is known of the named ranks that are in no call: their last call, and py-spy's stack."""
    assert found.finding is not None
    stuck = found.finding.stacks
    show_last(console, found, [rank for rank in found.finding.ranks if rank not in stuck])
    stacks = found.evidence.facts.stacks
    for rank in [rank for rank in found.finding.ranks if rank in stacks][:MOST_SHOWN]:
        lines = " ← ".join(map(one_line, stacks[rank][:FRAMES]))
        console.print(f"  rank {rank}, py-spy: {lines}")


def show_last(console: Console, found: Autopsy, ranks: Iterable[int]) -> None:
    """Print the last call of these ranks, those of one call together."""
    lasts: dict[Last, list[int]] = {}
    for rank in ranks:
        if rank in found.last:
            lasts.setdefault(found.last[rank], []).append(rank)
    for last, those in list(lasts.items())[:MOST_SHOWN]:
        where = "".join(f" at {one_line(line)}" for line in last.stack[:1])
        console.print(
            f"  {name_ranks(those)}: last call {one_line(last.call)}, {last.state}{where}"
        )


def show_total(console: Console, found: Autopsy) -> None:
    """Print what was read."""
    history = found.history
    calls = sum(len(dump.entries) for dump in history.dumps.values())
    dropped = [rank for rank, dump in history.dumps.items() if dump.dropped]
    known = "" if history.knows_world else " (how many the job had is not recorded)"
    line = f"{len(history.dumps)} dumps of {len(history.world)} ranks{known}, {calls} calls, "
    line += f"{len(history.meetings)} collectives lined up"
    if dropped:
        line += f"; earlier calls of {name_ranks(dropped)} were dropped"
    if found.without_dump:
        line += f"; no dump of {name_ranks(found.without_dump)}"
    console.print(line)
    if found.not_judged:
        console.print(
            f"not judged: {found.not_judged}; in those that are here no call is in progress, and all calls agree"
        )
    elif found.finding is None:
        console.print("no call is in progress, and all calls agree: these dumps show no hang")
