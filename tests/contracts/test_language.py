"""The loader reads what the language says and refuses all else, with the file, the line, and what to write instead."""

import hashlib
import time

import pytest

from isobit.contracts.language import grammar
from isobit.contracts.language.load import load_contract, parse_contract
from isobit.errors import ContractError

SMALL = """id: half-v1
version: 1.0.0
title: Halves
subject: halves:half
depends_on: [double-v1]
equations:
  half: {formula: h(x) = x / 2}
obligations:
  - {id: H-1, text: exact, equation: half}
inputs:
  plain:
    arguments: {x: [rows, 4]}
    sizes: {rows: [1, 3..5]}
    rows: rows
claims:
  - id: exact
    obligations: [H-1]
    relation: accurate
    against: halves:exact
    limit: 0.5
    unit: ulp
    inputs: plain
    level: L4
    proof: {engine: interval, by: "halves:prove", planted: one ulp off}
waivers:
  - {claim: exact, reason: later, owner: me, expires: 2027-01-31}
"""


def refused(text: str) -> ContractError:
    with pytest.raises(ContractError) as caught:
        parse_contract(text, "half.contract.yaml")
    return caught.value


def test_a_contract_is_read_whole():
    contract = parse_contract(SMALL, "half")
    assert contract.inputs["plain"].sizes == {"rows": (1, 3, 4, 5)}
    assert contract.claims[0].inputs == ("plain",)
    assert contract.claims[0].params == {"against": "halves:exact", "limit": 0.5, "unit": "ulp"}
    assert contract.waivers[0].expires == "2027-01-31"
    assert contract.code() == ("halves:half", "halves:prove", "halves:exact")


CHANGES = [
    # what is written, what it is replaced by, the line, and what is said
    ("title: Halves", "titel: Halves", 3, "did you mean 'title'?"),
    ("    limit: 0.5", "    limmit: 0.5", 20, "did you mean 'limit'?"),
    ("inputs:\n  plain", "input:\n  plain", 10, "did you mean 'inputs'?"),
    ("version: 1.0.0", "version: 1.0.0\nversion: 1.0.0", 3, "'version' twice"),
    ("title: Halves\n", "", 1, "add title"),
    ("version: 1.0.0", "version: 1.0", 2, "a version as 1.0.0"),
    ("id: half-v1", "id: [half]", 1, "a name of letters"),
    ("id: half-v1", "id: true", 1, "a name of letters"),
    ("id: half-v1", "1: half", 1, "a key that is text"),
    ("obligations: [H-1]", "obligations: H-1", 17, "a list of at least 1"),
    ("obligations: [H-1]", "obligations: []", 17, "a list of at least 1"),
    ("obligations: [H-1]", "obligations: [H-2]", 16, "did you mean 'H-1'?"),
    ("equation: half", "equation: hall", 9, "did you mean 'half'?"),
    ("inputs: plain", "inputs: plane", 16, "did you mean 'plain'?"),
    ("    inputs: plain\n", "", 16, "inputs of claim exact"),
    ("x: [rows, 4]", "x: [row, 4]", 0, "did you mean 'rows'?"),
    ("x: [rows, 4]", "x: [rows, -4]", 0, "axes of x"),
    ("x: [rows, 4]", "x: [rows, true]", 0, "axes of x"),
    ("    rows: rows", "    rows: row", 0, "did you mean 'rows'?"),
    ("relation: accurate", "relation: acurate", 18, "did you mean 'accurate'?"),
    ("limit: 0.5", "limit: .nan", 20, "a finite number"),
    ("limit: 0.5", "limit: .inf", 20, "a finite number"),
    ("limit: 0.5", "limit: 1e999", 20, "a finite number"),
    ("limit: 0.5", "limit: -1", 20, "of at least 0"),
    ("limit: 0.5", 'limit: "0.5"', 20, "a finite number"),
    ("limit: 0.5", "limit: yes", 20, "a finite number"),
    ("limit: 0.5", "limit: true", 20, "a finite number"),
    ("limit: 0.5", f"limit: {'9' * 50}", 20, "numbers of at most 40"),
    ("    unit: ulp\n", "", 16, "add unit"),
    ("    unit: ulp", "    unit: ulps", 21, "did you mean 'ulp'?"),
    ("    unit: ulp", "    unit: ulp\n    of: y", 16, "an argument"),
    ("relation: accurate", "relation: gradient\n    of: output", 16, "an argument"),
    ("level: L4", "level: L5", 23, "one of L2, L3, L4"),
    (
        '    proof: {engine: interval, by: "halves:prove", planted: one ulp off}\n',
        "",
        16,
        "a proof for L4",
    ),
    ('by: "halves:prove", ', "", 16, "by: a function for engine interval"),
    (", planted: one ulp off", "", 24, "add planted"),
    ("halves:exact", "halves:_exact", 19, "no leading underscore"),
    ("halves:exact", "halves", 19, "code as package:function"),
    ("halves:exact", '"os;x:y"', 19, "code as package:function"),
    ("owner: me, ", "", 26, "add owner"),
    ("reason: later, ", "", 26, "add reason"),
    (", expires: 2027-01-31", "", 26, "add expires"),
    ("expires: 2027-01-31", "expires: 2027-02-30", 26, "a day as 2027-01-31"),
    ("expires: 2027-01-31", "expires: 20270131", 26, "a day as 2027-01-31"),
    ("expires: 2027-01-31", 'expires: "2027-W05-7"', 26, "a day as 2027-01-31"),
    ("expires: 2027-01-31", "expires: never", 26, "a day as 2027-01-31"),
    ("claim: exact", "claim: exactly", 26, "did you mean 'exact'?"),
    ("depends_on: [double-v1]", "depends_on: [half-v1]", 0, "other than itself"),
    ("3..5", "5..3", 13, "runs as 1..257"),
    ("3..5", "-1", 13, "runs as 1..257"),
    ("3..5", "1.5", 13, "runs as 1..257"),
    ("3..5", f'"{"9" * 5000}"', 13, "at most 1,000 characters"),
    ("3..5", f"1..{'9' * 900}", 13, "runs as 1..257"),
    ("3..5", "0..1000000", 13, "runs as 1..257"),
    (
        "equation: half}",
        "equation: half}\n  - {id: H-1, text: again}",
        0,
        "each obligation id once",
    ),
    ("title: Halves", "title: &a Halves", 3, "no anchors and no aliases"),
    ("title: Halves", "title: *a", 3, "no anchors and no aliases"),
    ("title: Halves", "title: !!python/object/apply:os.system [true]", 3, "no tags"),
    ("title: Halves", "title: !own Halves", 3, "no tags"),
    ("title: Halves", "title: !!str Halves", 3, "no tags"),
    ("title: Halves", "title: a\x07b", 3, "YAML"),
    ("title: Halves", "title: 'Halves", 27, "YAML"),
    ("title: Halves", "<<: {title: Halves}", 3, "a key of a contract"),
    ("waivers:", "--- \nwaivers:", 25, "one document per file"),
    ("id: half-v1", "%YAML 1.1\n---\nid: half-v1", 1, "no directives"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"), CHANGES, ids=[f"{n}-{c[1][:24]}" for n, c in enumerate(CHANGES)]
)
def test_refused_with_line_and_remedy(old, new, line, said):
    assert old in SMALL
    error = refused(SMALL.replace(old, new, 1))
    assert said in str(error)
    assert (error.where, error.line) == ("half.contract.yaml", line)
    assert error.expected
    assert error.remedy


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ("relation: bound", "low, high or both"),
        ("relation: bound\n    low: 2\n    high: 1", "at most high"),
        ("relation: parity\n    against: a:b\n    limit: 1", "limit and unit"),
        ("relation: parity\n    against: a:b\n    unit: ulp", "limit and unit"),
        ("relation: monotone\n    argument: y", "an argument"),
        ("relation: invariant\n    under: [bach]", "did you mean 'batch'?"),
        ("relation: launches\n    loads: 1.5", "a whole number"),
    ],
)
def test_each_relation_asks_for_its_own(params, said):
    head, _, rest = SMALL.partition("relation: accurate")
    text = f"{head}{params}\n    inputs: plain\n    level: L2\n{rest[rest.index('waivers:') :]}"
    assert said in str(refused(text))


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# only words\n", "---\n", "- a", "words", "5", "null", "[]", "{}"]
)
def test_what_is_no_mapping_is_refused(text):
    refused(text)


def laughs() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


HOSTILE = {
    "billion laughs": laughs(),
    "deep flow": "[" * 400_000,
    "deep flow mappings": "{a: " * 200_000,
    "deep block": "- " * 400_000,
    "deep keys": "? " * 400_000,
    "many documents": "---\n" * 200_000,
    "many directives": "".join(f"%TAG !t{n}! x\n" for n in range(50_000)),
    "too long": "x" * 1_000_001,
    "many values": "[" + "1," * 400_000 + "]",
    "long number": "a: " + "9" * 900_000,
    "nearly a number": "a: " + "9" * 900_000 + "x",
    "nearly a fraction": "a: ." + "9" * 900_000 + "e+x",
    "long key": "k" * 900_000 + ": 1",
    "long names": SMALL.replace("[rows, 4]", f"[{'abcdefghij' * 30_000}]").replace(
        "sizes: {rows:", f"sizes: {{{'abcdefghik' * 30_000}:"
    ),
    "many obligations": SMALL.replace(
        "inputs:\n",
        "".join(f"  - {{id: O-{n}, text: t}}\n" for n in range(9_000))
        + "  - {id: O-1, text: t}\ninputs:\n",
        1,
    ),
    "half a character": "title: \ud800",
}


def time_loop():
    """CPU seconds of a little of both kinds of work: interpreted, and compiled."""
    begun, total = time.thread_time(), 0
    for at in range(80_000):
        total += at
    hashlib.blake2b(bytes(6_000_000))
    return time.thread_time() - begun


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_text_is_refused_soon(what):
    started = time.thread_time()
    refused(HOSTILE[what])
    # About two seconds, as a multiple of a loop: a busy machine slows both.
    assert time.thread_time() - started < 150 * time_loop()


def test_both_parsers_of_yaml_give_the_same(monkeypatch):
    import yaml

    quick = parse_contract(SMALL, "half")
    monkeypatch.setattr(grammar, "LOADER", yaml.SafeLoader)
    assert parse_contract(SMALL, "half") == quick


def test_words_are_words():
    plain = grammar.read_yaml(
        "{a: no, b: on, c: 2027-01-31, d: 0x1f, e: 1_000, f: 012, g: '1', h: ~, i: False}", "x"
    ).plain()
    expected = {
        "a": "no",
        "b": "on",
        "c": "2027-01-31",
        "d": "0x1f",
        "e": "1_000",
        "f": 12,
        "g": "1",
        "h": None,
        "i": False,
    }
    assert plain == expected


def test_files_that_cannot_be_read_are_refused(tmp_path):
    for name, data in (("missing", None), ("latin", b"title: \xe9")):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ContractError, match="UTF-8"):
            load_contract(path)


ENDLESS = {"runs": ", ".join(["0..100000"] * 100), "open": "3.."}


@pytest.mark.parametrize("what", ENDLESS)
def test_sizes_without_end_are_refused(what):
    refused(SMALL.replace("3..5", ENDLESS[what]))
