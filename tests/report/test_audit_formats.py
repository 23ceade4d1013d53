"""JSON of an audit is read back, and hostile JSON is refused by name; SARIF has a result for every finding."""

import json
import math
from dataclasses import replace

import pytest

from isobit.auditing.records import Accuracy, FirstDifference, Place, Skipped
from isobit.auditing.report.json import OrderSummary, audit_as_json, audit_from_json
from isobit.auditing.report.sarif import audit_as_sarif
from isobit.errors import ArgumentError
from tests.report import fake_audits as fakes


def test_json_is_read_back():
    audit = fakes.rich()
    again = audit_from_json(audit_as_json(audit))
    assert audit_as_json(again) == audit_as_json(audit)
    bare = [replace(one, orders=None) for one in audit.guilty]
    assert [replace(one, orders=None) for one in again.guilty] == bare
    first = again.guilty[1]
    assert isinstance(first.orders, OrderSummary)
    certificate = fakes.certificate(alone="chain")
    assert first.orders.digests == tuple(c.tree.digest for c in certificate.classes)
    assert not first.orders.kept
    without = fakes.audit_of(fakes.error_axis())
    assert math.isnan(audit_from_json(audit_as_json(without)).guilty[0].first.run)


def test_json_is_json_also_where_numbers_are_not_finite():
    first = FirstDifference((0,), math.inf, -math.inf, "0x7f80", "0xff80")
    one = fakes.guilty_of(
        Place("aten::mm"), share=1.0, first=first, accuracy=Accuracy("fp64", math.nan)
    )
    audit = fakes.audit_of(replace(fakes.batch_axis(), guilty=(one,)))
    text = audit_as_json(audit)

    def refuse(constant):
        raise AssertionError(constant)

    found = json.loads(text, parse_constant=refuse)
    assert found["axes"][0]["guilty"][0]["first"]["run"] == "Infinity"
    assert audit_from_json(text).guilty[0].first == first
    assert found["exit_code"] == 1
    assert found["complete"] is True
    assert found["conclusion"].startswith("1 of 268")


HOSTILE = {
    "audit.model": lambda found: found.update(model=["x"]),
    "audit.axes": lambda found: found.update(axes={"0": 1}),
    "audit as __class__": lambda found: found.update(__class__="os.system"),
    "audit.axes[0].judged": lambda found: found["axes"][0].update(judged=-1),
    "a whole number from 0 to": lambda found: found["axes"][0].update(judged=True),
    "audit.axes[0].judged\n  received: 3": lambda found: found["axes"][0].update(judged=3),
    "audit.axes[0].complete": lambda found: found["axes"][0].update(complete="yes"),
    "audit.axes[0].sides": lambda found: found["axes"][0].update(sides=["one"]),
    "audit.axes[0].seconds.forward": lambda found: found["axes"][0].update(seconds={"forward": []}),
    "audit.axes[0].guilty[0].kind": lambda found: found["axes"][0]["guilty"][0].update(kind="?"),
    "audit.axes[0].guilty[0].orders.digests[0]": lambda found: found["axes"][0]["guilty"][0].update(
        orders={"digests": [1], "texts": [], "kept": True}
    ),
    "audit.axes[0].guilty[0].place.operator": lambda found: found["axes"][0]["guilty"][0].update(
        place={}
    ),
    "audit.provenance.date": lambda found: found["provenance"].update(date=None),
    "audit.kept": lambda found: found.update(kept=True),
    "audit.exit_code": lambda found: found.update(exit_code=0),
    "audit.format": lambda found: found.update(format="isobit audit 99"),
    "a number as audit.axes[0].effect.largest": lambda found: found["axes"][0]["effect"].update(
        largest=10**400
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_fields_are_refused_by_name(name):
    found = json.loads(audit_as_json(fakes.rich()))
    HOSTILE[name](found)
    with pytest.raises(ArgumentError) as caught:
        audit_from_json(json.dumps(found))
    expected, _, received = name.partition("\n")
    if " as __" in name:
        assert "__class__" in str(caught.value)
    else:
        assert expected in str(caught.value)
        assert received in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "5", '"x"', "{", "[" * 100_000, '{"format": NaN}', "1" * 10_000, "{}",
        '{"format": "isobit audit 1", "format": "isobit audit 1"}', '{"format": "isobit audit 1"}',
    ],
)  # fmt: skip
def test_hostile_texts_are_refused(text):
    with pytest.raises(ArgumentError, match="audit") as caught:
        audit_from_json(text)
    assert len(str(caught.value)) < 600


def results_of(audit):
    run = json.loads(audit_as_sarif(audit))["runs"][0]
    return run, run["results"]


def test_sarif_has_a_result_for_every_guilty_operator():
    audit = fakes.rich()
    run, results = results_of(audit)
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for result in results:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
    found = [r for r in results if r["ruleId"] in ("audit-batch", "audit-decode")]
    assert len(found) == len(audit.guilty)
    assert len({json.dumps(r["partialFingerprints"]) for r in found}) == len(found)
    where = found[0]["locations"][0]["physicalLocation"]
    assert where == {
        "artifactLocation": {"uri": "modeling_qwen3.py"},
        "region": {"startLine": 81},
    }
    open_ = [r["message"]["text"] for r in results if r["ruleId"] == "audit-without-conclusion"]
    assert len(open_) == 2  # decode is not complete, threads was skipped
    assert "this machine has one processor" in open_[1]


def test_sarif_levels():
    errors = results_of(fakes.audit_of(fakes.error_axis()))[1]
    assert [r["level"] for r in errors] == ["error"]
    assert "this is a bug, not rounding" in errors[0]["message"]["text"]
    place = Place("aten::mm", "x", "a b/ü.py:7", 1)
    cases = {
        "warning": fakes.guilty_of(place, share=0.5),
        "note": fakes.guilty_of(place, share=0.0),
    }
    for level, one in cases.items():
        audit = fakes.audit_of(replace(fakes.batch_axis(), guilty=(one,)))
        (result,) = results_of(audit)[1]
        assert result["level"] == level
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert uri == "a%20b/%C3%BC.py"
    unmeasured = fakes.guilty_of(Place("aten::mm", "x"), share=None, effect=None)
    audit = fakes.audit_of(replace(fakes.batch_axis(), guilty=(unmeasured,)))
    (result,) = results_of(audit)[1]
    assert result["level"] == "warning"  # not measured is not zero
    assert "physicalLocation" not in result["locations"][0]


def test_sarif_without_results_only_if_kept():
    kept = fakes.audit_of(fakes.clean_axis(), fakes.clean_axis("repeat"))
    assert kept.kept
    assert results_of(kept)[1] == []
    for audit in (
        fakes.audit_of(provenance=None),
        fakes.audit_of(fakes.clean_axis(judged=0, complete=False)),
        replace(kept, skipped=(Skipped("tp", "one rank"),)),
    ):
        assert not audit.kept
        assert results_of(audit)[1]
