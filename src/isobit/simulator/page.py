"""The findings of `isobit simulate` as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isobit.foundation.records import Provenance
from isobit.report.finding_page import (
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
