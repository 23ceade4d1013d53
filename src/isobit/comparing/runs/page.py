"""Two runs of a script, compared, as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isobit.foundation.records import Provenance
from isobit.report.finding_page import write_card, write_facts, write_frame, write_table

APPLIES = {True: "yes", None: "not known", False: "no"}


def write_twice_page(
    record: Mapping[str, Any], sentence: str, origin: Provenance | None = None
) -> str:
    """Return the page of one comparison.

    Args:
        record: The record of `--json`, with plain values.
        sentence: The verdict with its numbers.
        origin: Where the page comes from.
    """
    found = record["comparison"]
    body = ""
    if found["changed"] is not None:
        body += f"<h2>First difference</h2>{write_difference(found)}"
    if record["causes"]:
        order = [True, None, False]
        causes = sorted(record["causes"], key=lambda cause: order.index(cause["applies"]))
        rows = [[each["name"], APPLIES[each["applies"]], each["shown_by"]] for each in causes]
        body += "<h2>Causes</h2>" + write_table(["cause", "applies", "shown by"], rows)
    if found["harmless"]:
        rows = [[place_of(each["call"]), each["why"], each["detail"]] for each in found["harmless"]]
        body += "<h2>Differs without effect so far</h2>"
        body += write_table(["operator", "because of", "values"], rows)
    title = f"Two runs of {record['script']}"
    return write_frame(title, "good" if record["equal"] else "bad", sentence, body, origin)


def write_difference(found: Mapping[str, Any]) -> str:
    """Draw the first tensor of the training's state that differs, and the operator that it comes from."""
    changed, origin = found["changed"], found["origin"]
    facts = {"first run": changed["values"][0], "second run": changed["values"][1]}
    if origin is None:
        facts["comes from"] = "no operator: memory was changed outside of torch"
    else:
        facts["comes from"] = f"{place_of(origin['call'])}, call {origin['call']['number']}"
        facts["because of"] = f"{origin['why']}: {origin['detail']}"
    title = f"step {changed['step']}, {changed['what']} {changed['name']}".strip()
    return write_card(title, "", write_facts(facts))


def place_of(call: Mapping[str, Any]) -> str:
    """Return a call of an operator in words."""
    module = f" in {call['module']}" if call["module"] else ""
    backward = ", backward" if call["backward"] else ""
    return f"{call['operator']}{module}{backward} ({call['source'] or 'no source line'})"
