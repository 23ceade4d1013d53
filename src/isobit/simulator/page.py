"""The findings of `isobit simulate`, and what the dumps of a hang show, as self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isobit.foundation.records import Provenance
from isobit.report.pages import (
    MOST_SHOWN,
    sentences_of,
    write_card,
    write_facts,
    write_frame,
    write_places,
    write_printed,
    write_ranks,
    write_table,
)


def write_simulate_page(record: Mapping[str, Any], origin: Provenance | None = None) -> str:
    """Return the page of one command.

    Args:
        record: The record of `--json`, with plain values.
        origin: Where the page comes from.
    """
    findings, skipped = record["findings"], record["not_judged"]
    seeds, clean = len(record["seeds"]), len(record["clean_seeds"])
    verdict = (
        f"{clean} of {seeds} seed{'s' * (seeds != 1)} clean on {record['ranks']} ranks; {len(findings) or 'no'} "
        f"kind{'s' * (len(findings) != 1)} of findings; {len(skipped) or 'no'} checks not judged"
    )
    cards = "".join(write_finding(each, record["ranks"], seeds) for each in findings)
    body = f"<h2>What was found</h2>{cards or '<p>Nothing.</p>'}"
    body += "<h2>What was not judged</h2>"
    body += (
        write_table(["check", "reason"], list(skipped.items())) if skipped else "<p>Nothing.</p>"
    )
    printed = record["printed"][0] if record["printed"] else ""
    if printed.strip():
        body += f"<h2>What rank 0 printed</h2>{write_printed(printed)}"
    if clean > 1:
        agree = record["prints_depart"] or f"They agree over {clean} clean seeds."
        body += "<h2>Prints of all seeds</h2>" + write_facts({"prints": agree})
    return write_frame(
        f"Simulation of {record['script']}", "bad" if findings else "good", verdict, body, origin
    )


def write_finding(finding: Mapping[str, Any], ranks: int, seeds: int) -> str:
    """Draw one kind of finding: its ranks, its words, where ranks were, and how to see it again."""
    first = finding["first"]
    about = f"{len(finding['seeds'])} of {seeds} seeds, first {finding['seeds'][0]}"
    if first["follows"]:
        about += f"; may follow from: {first['follows']}"
    facts = {
        **sentences_of(first["text"]),
        "note": first["note"],
        "wrote": first["wrote"],
        "again": finding["replay"],
    }
    inside = write_ranks(range(ranks), finding["ranks"]) + write_facts(facts)
    return write_card(
        finding["kind"], about, inside + write_places(first["stacks"]), bool(first["follows"])
    )


def write_autopsy_page(record: Mapping[str, Any], origin: Provenance | None = None) -> str:
    """Return the page of one folder of dumps.

    Args:
        record: The record of `--json`, with plain values.
        origin: Where the page comes from.
    """
    finding, dumps = record["finding"], record["dumps"]
    world = sorted({*map(int, dumps), *record["without_dump"]})
    calls = sum(dump["calls"] for dump in dumps.values())
    unjudged = record.get("not_judged", "")
    verdict = "no call is in progress, and all calls agree" if finding is None else finding["kind"]
    verdict = f"not judged: {unjudged}; in those that are here {verdict}" if unjudged else verdict
    verdict += f"; {len(dumps)} dumps of {len(world)} ranks, {calls} calls, {record['collectives']} collectives"
    body = "" if finding is None else f"<h2>Cause</h2>{write_cause(finding, world)}"
    places = record["calls_in_progress"]
    if places:
        cards = "".join(write_place(place, world) for place in places[:MOST_SHOWN])
        body += f"<h2>Calls in progress</h2>{cards}"
    rows = [
        [rank, last["call"], last["state"], next(iter(last["stack"]), "")]
        for rank, last in record["last_calls"].items()
    ]
    if rows:
        body += "<h2>Last call of each rank</h2>"
        body += write_table(["rank", "call", "state", "where"], rows)
    others = [["log", line] for line in record["logs"]]
    others += [[f"rank {rank}", reason] for rank, reason in record["broken"].items()]
    others += [[f"rank {rank}, py-spy", " ← ".join(s[:4])] for rank, s in record["py_spy"].items()]
    others += [["not used", name] for name in record["skipped"]]
    others += [[f"rank {rank}", "left no dump"] for rank in record["without_dump"]]
    if others:
        body += "<h2>What else the folder has</h2>" + write_table(["from", "what"], others)
    return write_frame(
        "Autopsy of a hang", "bad" if finding or unjudged else "good", verdict, body, origin
    )


def write_cause(finding: Mapping[str, Any], world: list[int]) -> str:
    """Draw the cause: the ranks to blame, its words, and where ranks were."""
    facts = {name: finding[name] for name in ("expected", "received", "remedy", "note")}
    inside = write_ranks(world, finding["ranks"]) + write_facts(facts)
    return write_card(finding["kind"], "", inside + write_places(finding["stacks"]))


def write_place(place: Mapping[str, Any], world: list[int]) -> str:
    """Draw a call in progress: outlined are the ranks in it, filled those that did not join."""
    differs = "the calls of these ranks differ" if place["calls_differ"] else ""
    missing = "not joined by the ranks filled" if place["missing"] else "joined by every member"
    if not place["missing"] and not place.get("members_known", True):
        missing = "joined by every member that left a dump; others are not recorded"
    strip = write_ranks(world, place["missing"], place["ranks"])
    return write_card(
        place["call"], differs or missing, strip, not place["missing"] and not differs
    )
