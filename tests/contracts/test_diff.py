"""What changed between versions: loosening asks for a major version, tightening for a minor, words for a patch."""

import re

import pytest

from isobit.contracts.language.diff import diff
from isobit.contracts.language.load import parse_contract
from isobit.records import to_json

TEXT = """
id: c-v1
version: 1.0.0
title: A title
subject: isobit:linear
operator: isobit::linear
depends_on: [base-v1]
references: [a paper]
equations:
  y: {formula: y = x + 1, domain: x in F}
obligations:
  - {id: A-1, text: First, equation: y}
  - {id: A-2, text: Second}
inputs:
  plain:
    arguments: {x: [rows, 3]}
    sizes: {rows: [1..9]}
    dtypes: [float32, bfloat16]
    edges: [nans, zeros]
    thorough: {rows: [1..99]}
  square:
    arguments: {x: [rows, 3]}
    sizes: {rows: [4]}
  unused:
    arguments: {x: [rows, 3]}
    sizes: {rows: [4]}
claims:
  - id: rows
    text: in words
    obligations: [A-1, A-2]
    relation: invariant
    under: [batch, threads]
    inputs: [plain, square]
    level: L3
    sabotage: [order by batch, identity]
    control: ["isobit.a:stock"]
  - id: error
    obligations: [A-2]
    relation: accurate
    against: "isobit.a:exact"
    limit: 2
    unit: ulp
    inputs: plain
    level: L4
    proof: {engine: interval, by: "isobit.a:prove", planted: identity}
  - id: same
    obligations: [A-1]
    relation: parity
    against: "isobit.a:other"
    inputs: plain
    level: L2
  - id: range
    obligations: [A-1]
    relation: bound
    low: 0
    high: 1
    inputs: plain
    level: L2
  - id: integers
    obligations: [A-1]
    relation: algebra
    predicate: "isobit.a:p"
    integers: {k: [1, 64]}
    level: L2
    sabotage: ["isobit.a:wrong"]
waivers:
  - {claim: range, reason: slow, owner: Ann, expires: 2027-01-01}
"""
WAIVER = "  - {claim: range, reason: slow, owner: Ann, expires: 2027-01-01}\n"
NEW = "  - {id: new, obligations: [A-1], relation: launches, loads: 1, inputs: plain, level: L2}\n"
SAME = 'against: "isobit.a:other"'
TIGHTER = [
    ("limit: 2", "limit: 1", "tightened: claim error: limit: 2 → 1"),
    (
        "level: L3",
        "level: L4\n    proof: {engine: order, by: 'isobit.a:b', planted: identity}",
        "tightened: claim rows: level",
    ),
    ("[batch, threads]", "[batch, threads, cache]", "tightened: claim rows: under: with cache"),
    ("rows: [1..9]", "rows: [1..20]", "tightened: inputs plain: sizes of rows: with 10..20"),
    (
        "[float32, bfloat16]",
        "[float32, bfloat16, float16]",
        "tightened: inputs plain: dtypes: with float16",
    ),
    (
        "edges: [nans, zeros]",
        "edges: [nans, zeros, ties]",
        "tightened: inputs plain: edges: with ties",
    ),
    ("low: 0", "low: 0.5", "tightened: claim range: low: 0 → 0.5"),
    ("high: 1", "high: 0.5", "tightened: claim range: high: 1 → 0.5"),
    ("k: [1, 64]", "k: [0, 64]", "tightened: claim integers: integers: k: low"),
    ("k: [1, 64]", "k: [1, null]", "tightened: claim integers: integers: k: high: 64 → inf"),
    (
        "[order by batch, identity]",
        "[order by batch, identity, negated]",
        "tightened: claim rows: sabotage: with negated",
    ),
    (
        "obligations: [A-2]",
        "obligations: [A-2, A-1]",
        "tightened: claim error: obligations: with A-1",
    ),
    ("[base-v1]", "[base-v1, more-v1]", "tightened: depends_on: with more-v1"),
    (
        WAIVER,
        WAIVER.replace("2027", "2026"),
        "tightened: waiver of range: expires: 2027-01-01 → 2026-01-01",
    ),
    ("waivers:\n" + WAIVER, "", "tightened: waiver of range"),
]
ADDED = [
    (
        "  - {id: A-2, text: Second}",
        "  - {id: A-2, text: Second}\n  - {id: A-3, text: Third}",
        "added: obligation A-3",
    ),
    ("  - id: same\n", NEW + "  - id: same\n", "added: claim new"),
    ("  y: {", "  z: {formula: z = 2}\n  y: {", "added: equation z"),
    ("domain: x in F", "domain: x in F, codomain: F", "added: equation y: codomain"),
]
CHANGED = [
    (
        "subject: isobit:linear",
        "subject: isobit:softmax",
        "changed: subject: isobit:linear → isobit:softmax",
    ),
    ("id: c-v1", "id: c-v2", "changed: id"),
    ("formula: y = x + 1", "formula: y = x + 2", "changed: equation y: formula"),
    ("unit: ulp", "unit: abs", "changed: claim error: unit"),
    ("isobit.a:exact", "isobit.a:looser", "changed: claim error: against"),
    ("engine: interval", "engine: order", "changed: claim error: proof: engine"),
    (
        "inputs: [plain, square]",
        "inputs: [square, plain]",
        "changed: claim rows: inputs of L3 and sabotage",
    ),
    (
        "dtypes: [float32, bfloat16]",
        "dtypes: [float32, bfloat16]\n    values: unit",
        "changed: inputs plain: values",
    ),
    (
        "relation: parity",
        "relation: accurate\n    limit: 0\n    unit: ulp",
        "changed: claim same: relation",
    ),
    (
        "under: [batch, threads]",
        "under: [batch, threads]\n    of: x",
        "changed: claim rows: of: output → x",
    ),
]
GONE = [
    (SAME, SAME + "\n    limit: 0\n    unit: ulp", "loosened: claim same: limit: none → 0"),
    ("    high: 1\n", "", "loosened: claim range"),
    (
        '    control: ["isobit.a:stock"]\n',
        "",
        "loosened: claim rows: control: without isobit.a:stock",
    ),
    (
        "waivers:\n",
        "waivers:\n  - {claim: rows, reason: r, owner: o, expires: 2027-01-01}\n",
        "loosened: waiver of rows",
    ),
    ("operator: isobit::linear\n", "", "removed: operator"),
    (
        "    thorough: {rows: [1..99]}\n",
        "",
        "loosened: inputs plain: thorough of rows: without 1..99",
    ),
]
WORDS = [
    ("title: A title", "title: Another", "reworded: title"),
    ("text: First", "text: First of all", "reworded: obligation A-1"),
    ("text: in words", "text: in other words", "reworded: claim rows: text"),
    ("[a paper]", "[another]", "reworded: references"),
    ("owner: Ann", "owner: Bob", "reworded: waiver of range: owner"),
    (
        "sizes: {rows: [4]}\nclaims",
        "sizes: {rows: [4, 5]}\nclaims",
        "reworded: inputs unused: sizes of rows",
    ),
]


def contract_of(text):
    return parse_contract(text, "c.yaml")


def change(old, new, version="1.0.0"):
    assert old in TEXT
    altered = TEXT.replace(old, new, 1).replace("version: 1.0.0", f"version: {version}")
    return diff(contract_of(TEXT), contract_of(altered)), diff(
        contract_of(altered), contract_of(TEXT)
    )


@pytest.mark.parametrize(("old", "new", "said"), TIGHTER + ADDED)
def test_more_is_minor_and_the_way_back_is_major(old, new, said):
    there, back = change(old, new)
    assert there.advice == "minor"
    assert any(str(a).startswith(said) for a in there.alterations)
    assert back.advice == "major"


@pytest.mark.parametrize(("old", "new", "said"), GONE + CHANGED)
def test_less_or_other_is_major(old, new, said):
    found, _ = change(old, new)
    assert found.advice == "major"
    assert any(str(a).startswith(said) for a in found.alterations)


@pytest.mark.parametrize(("old", "new", "said"), WORDS)
def test_words_are_a_patch(old, new, said):
    found, _ = change(old, new)
    assert found.advice == "patch"
    assert [str(a).startswith(said) for a in found.alterations] == [True]


def test_a_claim_removed_is_major():
    shorter = re.sub(r"  - id: same\n(    .*\n)+", "", TEXT)
    found = diff(contract_of(TEXT), contract_of(shorter))
    assert (found.advice, [a.what for a in found.alterations]) == ("major", ["claim same"])


def test_lines_and_spaces_are_nothing():
    moved = TEXT.replace("\nid:", "\n\n\nid:").replace("y = x + 1", "y =  x + 1")
    found = diff(contract_of(TEXT), contract_of(moved))
    assert (found.advice, found.alterations, found.enough) == ("none", (), True)


@pytest.mark.parametrize(
    ("old", "new", "version", "enough", "needed"),
    [
        ("limit: 2", "limit: 3", "1.1.0", False, "2.0.0"),
        ("limit: 2", "limit: 3", "2.0.0", True, "2.0.0"),
        ("limit: 2", "limit: 1", "1.0.1", False, "1.1.0"),
        ("limit: 2", "limit: 1", "1.1.0", True, "1.1.0"),
        ("limit: 2", "limit: 1", "2.0.0", True, "1.1.0"),
        ("text: First", "text: Erst", "1.0.0", False, "1.0.1"),
        ("text: First", "text: Erst", "1.0.1", True, "1.0.1"),
        ("text: First", "text: Erst", "0.9.9", False, "1.0.1"),
    ],
)
def test_the_version_must_follow(old, new, version, enough, needed):
    found, _ = change(old, new, version)
    assert (found.enough, found.needed) == (enough, needed)
    assert ("not enough" in str(found)) == (not enough)


def test_a_change_is_json():
    assert '"advice": "major"' in to_json(change("limit: 2", "limit: 3")[0])
