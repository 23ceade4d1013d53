"""A contract in words: every part said, every relation in a sentence, every number with its denominator."""

import subprocess
import sys
from dataclasses import replace

import pytest

from isobit.contracts.authoring.explain import explain, say_claim, say_sizes
from isobit.contracts.language.load import load_contract, parse_contract
from isobit.contracts.language.schema import RELATIONS
from isobit.contracts.store.tree import find_contracts, library
from isobit.foundation.records import ClaimRecord, ContractStatus, Planted, Proof

HEAD = """
id: c-v1
version: 1.0.0
title: A title
subject: isobit:linear
depends_on: [base-v1, other-v1]
equations: {y: {formula: y = x + 1, domain: x in F, codomain: F}}
obligations: [{id: A-1, text: First, equation: y}, {id: A-2, text: Second}]
inputs: {plain: {arguments: {x: [rows, 3]}, sizes: {rows: [1..9, 33]}, edges: [nans], options: {dim: -1}}}
"""
PROVED = "proof: {engine: order, by: 'isobit.a:b', planted: identity}"
RELATION = "relation: invariant, under: [batch, threads], inputs: plain, level: L4"
ROWS = f"- {{id: rows, obligations: [A-1], {RELATION}, {PROVED}}}"
SENTENCES = {
    "relation: invariant, under: [batch, layout], of: x": "bits of the gradient of x do not change under batch, layout",
    "relation: accurate, against: 'isobit.a:f', limit: 2.5, unit: ulp": "the output is within 2.5 ulp of isobit.a:f",
    "relation: parity, against: 'isobit.a:f'": "the output agrees with isobit.a:f to the bit",
    "relation: parity, against: 'isobit.a:f', limit: 1, unit: rel": "the output agrees with isobit.a:f within 1 rel",
    "relation: gradient, of: x, against: 'isobit.a:f', limit: 1, unit: norm": "the gradient of x is within 1 norm",
    "relation: bound, low: 0, high: 1": "each output is at least 0 and at most 1",
    "relation: bound, high: 1": "each output is at most 1",
    "relation: sums_to, total: 1, limit: 1e-6": "sums to 1 within 1e-06",
    "relation: monotone, argument: x": "does not decrease along the last axis where x does not",
    "relation: roundtrip, inverse: 'isobit.a:g'": "isobit.a:g brings the first argument back",
    "relation: refuses, error: 'isobit:ArgumentError', calls: 'isobit.a:c'": "raises isobit:ArgumentError with",
    "relation: launches, loads: 1": "of a binary that is loaded once",
    "relation: algebra, predicate: 'isobit.a:p', integers: {k: [1, null], n: [0, 8]}": "k in 1..∞ and n in 0..8",
    "relation: certified, rows: [1, 3], targets: [sm_80]": "a row has one expression at 2 row counts",
    "relation: holds, predicate: 'isobit.a:p'": "isobit.a:p holds",
}


def contract_of(*claims, more=""):
    return parse_contract(
        HEAD + "claims:\n" + "".join(f"  {claim}\n" for claim in claims) + more, "c.yaml"
    )


def status_of(*claims, verdict="kept"):
    return ContractStatus("c-v1", "1.0.0", "A title", "c.yaml", "d", verdict, 3, 4, claims=claims)


def words_of(contract, *claims, **status):
    return {s.title: "\n".join(s.lines) for s in explain(contract, status_of(*claims, **status))}


@pytest.mark.parametrize("keys", SENTENCES)
def test_every_relation_has_a_sentence(keys):
    (claim,) = contract_of(
        f"- {{id: a, obligations: [A-1], inputs: plain, level: L2, {keys}}}"
    ).claims
    said = say_claim(claim)
    assert said.startswith("a: ")
    assert SENTENCES[keys] in said
    assert said.endswith("must reach L2")


def test_no_relation_is_left_out():
    assert {keys.split(",")[0].removeprefix("relation: ") for keys in SENTENCES} == set(RELATIONS)


def test_the_sentence_says_where_how_far_and_what_must_be_caught():
    said = say_claim(contract_of(ROWS).claims[0])
    assert said == (
        "rows: bits of the output do not change under batch, threads; drawn from plain; must catch order by batch, "
        "last row off by one ulp, order by batch with gradients, sum shared among threads; must reach L4, "
        "proved by order certificate"
    )


def test_the_parts_are_said_in_order():
    waiver = "waivers: [{claim: rows, reason: slow, owner: Ann, expires: 2027-01-01}]"
    sections = explain(contract_of(ROWS, more=waiver), status_of(verdict="could-not-run"))
    kinds = ["about", "equation", "obligation", "claim", "obligation", "inputs", "waiver"]
    assert [section.kind for section in sections] == kinds
    said = {section.title: section.lines for section in sections}
    assert "depends on: base-v1 and other-v1" in said["c-v1 1.0.0: A title"]
    assert "judged: isobit:linear" in said["c-v1 1.0.0: A title"]
    assert said["equation y"] == ("y = x + 1", "on x in F", "giving F")
    assert said["obligation A-2"] == ("Second", "unbound, at L0: it has no claim")
    assert said["inputs plain"][:2] == ("x[rows, 3]", "rows = 1..9, 33")
    assert said["waiver of rows"] == ("slow; owner Ann, until 2027-01-01",)
    assert "no evidence" in said["claim rows"][1]


def test_evidence_has_its_denominators():
    planted = (
        Planted("order by batch", True, ""),
        Planted("stale cache", False, "64 compared, none differ"),
    )
    kept = ClaimRecord("rows", "invariant", "kept", 4, 4, 9, 10_240, 123_456, planted=planted[:1])
    kept = replace(kept, proof=Proof("order", "K ≤ 4096", 7))
    said = words_of(contract_of(ROWS), kept)
    assert said["obligation A-1"].endswith("kept, at L4")
    assert (
        "kept at L4 of L4: 0 of 123,456 compared differ, in 9 cases of 10,240 inputs"
        in said["claim rows"]
    )
    assert "planted: 1 of 1 caught: order by batch" in said["claim rows"]
    assert "proof by order certificate, 7 cases, covers K ≤ 4096" in said["claim rows"]
    broken = replace(
        kept,
        verdict="broken",
        level=1,
        differing=3,
        planted=planted,
        detail="at [0]",
        replay="isobit contract replay",
    )
    said = words_of(contract_of(ROWS), broken)
    assert said["obligation A-1"].endswith("broken, at L0")
    for line in (
        "3 of 123,456",
        "1 of 2 caught",
        "missed: stale cache: 64 compared",
        "found: at [0]",
        "replay: isobit contract replay",
    ):
        assert line in said["claim rows"]
    assert (
        "planted: none was tried"
        in words_of(contract_of(ROWS), replace(kept, planted=()))["claim rows"]
    )


def test_runs_of_sizes_are_short():
    assert say_sizes([3, 1, 2, 7, 9, 8, 20, 21]) == "1..3, 7..9, 20, 21"


@pytest.mark.parametrize("path", [*find_contracts(library())], ids=lambda p: p.parent.name)
def test_every_claim_of_the_library_is_explained(path):
    contract = load_contract(path)
    sections = explain(contract, status_of())
    assert {s.name for s in sections if s.kind == "claim"} == {
        claim.id for claim in contract.claims
    }


def test_words_need_no_torch():
    modules = ", ".join(f"isobit.contracts.authoring.{name}" for name in ("explain", "scaffold"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
