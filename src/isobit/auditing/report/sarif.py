"""An audit as SARIF: a result per guilty operator, at the line that calls it."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from isobit.auditing.records import ORDER, Audit, AxisReport, Guilty
from isobit.auditing.report.sentence import (
    changed,
    conclude_axis,
    depends,
    describe_kind,
    errors_of,
    percent,
    ulps_of,
)
from isobit.foundation.plain_text import one_line
from isobit.report.junit_sarif import SARIF
from isobit.report.markup import facts_of

OPEN_RULE = "audit-without-conclusion"
LARGEST_LINE = 2**31 - 1


def audit_as_sarif(audit: Audit) -> str:
    """Write an audit as SARIF 2.1.0.

    An operator that is wrong is an error, one that has an effect a warning, one without effect a note. An axis that
    was skipped or is not complete is a warning of its own: no results would read as a pass.

    Args:
        audit: what was found.

    Returns:
        JSON of one run, with a rule per axis.

    Example:
        >>> import json
        >>> from isobit.auditing.records import Audit
        >>> json.loads(audit_as_sarif(Audit("tiny", "2 samples", axes=())))["runs"][0]["results"][0]["level"]
        'warning'
    """
    results = [_result(one, axis) for axis in audit.axes for one in axis.guilty]
    results += [_open(conclude_axis(axis)) for axis in audit.axes if not axis.complete]
    results += [
        _open(f"The axis {one.axis} was not audited: {one.reason}") for one in audit.skipped
    ]
    if not audit.axes and not audit.skipped:
        results.append(_open("Nothing was audited."))
    rules = [_rule(name) for name in dict.fromkeys(one.axis for one in audit.guilty)]
    rules += [_text_rule(OPEN_RULE, "An axis without a conclusion.")]
    index = {rule["id"]: at for at, rule in enumerate(rules)}
    for result in results:
        result["ruleIndex"] = index[result["ruleId"]]
    driver: dict[str, Any] = {"name": "isobit", "rules": rules}
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    origin = audit.provenance
    if origin is not None:
        driver["version"] = one_line(origin.isobit)
        run["invocations"] = [
            {
                "commandLine": one_line(origin.command),
                "endTimeUtc": origin.date.replace("+00:00", "Z"),
                "executionSuccessful": True,
            }
        ]
        run["properties"] = {name: one_line(value) for name, value in facts_of(origin)}
    return json.dumps({"$schema": SARIF, "version": "2.1.0", "runs": [run]}, indent=2)


def level_of(one: Guilty) -> str:
    """Return the level of a guilty operator; an effect that was not measured is not none."""
    if one.is_error:
        return "error"
    if (
        (one.kind == ORDER or one.unread)
        and one.effect is not None
        and not one.effect.differ
        and not one.share
    ):
        return "note"
    return "warning"


def _rule_id(axis: str) -> str:
    return f"audit-{one_line(axis)}"


def _rule(axis: str) -> dict[str, Any]:
    return _text_rule(_rule_id(axis), f"An operator must not {depends(axis, 2)}.")


def _text_rule(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "shortDescription": {"text": one_line(text)}}


def _result(one: Guilty, axis: AxisReport) -> dict[str, Any]:
    place = one.place
    key = f"{one.axis}|{place.operator}|{place.module}|{place.backward}|{place.call}"
    return {
        "ruleId": _rule_id(one.axis),
        "level": level_of(one),
        "message": {"text": _message(one, axis)},
        "locations": [_location(one)],
        "partialFingerprints": {"isobitAudit/v1": one_line(key)},
    }


def _message(one: Guilty, axis: AxisReport) -> str:
    parts = [
        f"{one.place} {depends(one.axis, 1)}: {one.elements:,} of {one.of:,} elements differ, "
        f"by at most {ulps_of(one)} ulp",
        describe_kind(one),
        f"errors: {errors_of(one, axis.sides)}",
    ]
    if one.effect is not None:
        parts.append(f"substituting it changes {changed(one.effect)}")
    if one.share is not None:
        parts.append(f"share of the effect: {percent(one.share)}")
    if one.remedy:
        parts.append(f"remedy: {one.remedy}")
    return one_line(". ".join(parts))


def _location(one: Guilty) -> dict[str, Any]:
    """Return the module, and file and line where the source has them."""
    name = one_line(one.place.module) or "the model"
    location: dict[str, Any] = {
        "logicalLocations": [{"fullyQualifiedName": name, "kind": "module"}]
    }
    source = one_line(one.place.source)
    found = re.fullmatch(r"(.+):([0-9]{1,10})", source)
    path, line = (found.group(1), int(found.group(2))) if found else (source, 0)
    if path:
        uri = quote(path, safe="/")
        physical: dict[str, Any] = {
            "artifactLocation": {"uri": f"file://{uri}" if uri.startswith("/") else uri}
        }
        if 1 <= line <= LARGEST_LINE:
            physical["region"] = {"startLine": line}
        location["physicalLocation"] = physical
    return location


def _open(text: str) -> dict[str, Any]:
    return {"ruleId": OPEN_RULE, "level": "warning", "message": {"text": one_line(text)}}
