"""Theorem: a certificate is the same after it was written as JSON and read; what was changed is refused by its name."""

import json
import re
from dataclasses import replace

import pytest

from isobit.certifying.report.json import certificate_as_json, certificate_from_json
from isobit.certifying.report.page import write_certificate_page
from isobit.certifying.report.text import describe_certificate
from isobit.errors import ArgumentError
from isobit.order.addition import chain, digest
from tests.report import fake_certificates as fakes


@pytest.mark.parametrize("name", fakes.CASES)
def test_a_certificate_is_read_back(name):
    found = fakes.CASES[name]()
    again = certificate_from_json(certificate_as_json(found))
    assert again == found
    assert write_certificate_page(again) == write_certificate_page(found)
    assert describe_certificate(again) == describe_certificate(found)


def test_the_data_of_a_page_is_a_certificate():
    page = write_certificate_page(fakes.split_by_rows())
    (data,) = re.findall(r'id="certificate">(.*)</script>', page)
    assert certificate_from_json(data) == fakes.split_by_rows()


@pytest.mark.parametrize("tree", [0, 5, (0, 1), ((3, 1), (0, 2)), chain(range(20_000))])
def test_orders_of_any_depth_are_read_back(tree):
    found = fakes.kept()
    one = replace(found.targets[0].classes[0], tree=tree)
    found = replace(found, targets=(replace(found.targets[0], classes=(one,)),))
    again = certificate_from_json(certificate_as_json(found))
    assert digest(again.targets[0].classes[0].tree) == digest(tree)


def change(path, value):
    """Return the JSON of a certificate with one field changed."""
    record = json.loads(certificate_as_json(fakes.split_by_rows()))
    at = record
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(record)


CLASS = ("targets", 0, "classes", 0)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("format",), "isobit audit 1", "certificate.format"),
        (("kept",), True, "certificate.kept"),
        (("exit_code",), 0, "certificate.exit_code"),
        (("names",), 7, "certificate.names"),
        (("surprise",), 1, "certificate"),
        (("function",), None, "certificate.function"),
        (("seconds",), "soon", "certificate.seconds"),
        (("targets", 1, "target"), 90, "certificate.targets[1].target"),
        (("targets", 0, "outcomes", 2, "verdict"), "fine", "outcomes[2].verdict"),
        (("targets", 0, "outcomes", 2, "names"), -1, "outcomes[2].names"),
        ((*CLASS, "order", "words"), "a chain", "classes[0].order"),
        ((*CLASS, "order", "digest"), "00", "classes[0].order"),
        ((*CLASS, "order", "steps"), [], "order"),
        ((*CLASS, "order", "steps"), [[0, 1], [256, 256]], "order.steps[1]"),
        ((*CLASS, "order", "steps"), [[0, 300]], "order.steps[0]"),
        ((*CLASS, "order", "steps"), [[0, 1], [2, 3]], "order.steps"),
        ((*CLASS, "order", "steps"), [[0, 1], []], "order.steps[1]"),
    ],
)
def test_what_was_changed_is_refused_by_its_name(path, value, named):
    with pytest.raises(ArgumentError) as caught:
        certificate_from_json(change(path, value))
    assert named in str(caught.value)
    assert "isobit certify --json" in caught.value.remedy


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": NaN}', '{"a": 1, "a": 2}', "[" * 99999]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ArgumentError, match="certificate"):
        certificate_from_json(text)
