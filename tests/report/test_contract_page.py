"""Pages, graphs and exchange files of contracts: complete, offline, with denominators, and safe against names."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from isobit.contracts.authoring.explain import explain
from isobit.contracts.language.load import parse_contract
from isobit.contracts.report import graph as contract_graph
from isobit.contracts.report.page import draw_contracts
from isobit.contracts.store import ladder
from isobit.foundation.records import (
    ClaimRecord,
    ContractStatus,
    Planted,
    Proof,
    Provenance,
    Section,
)
from isobit.report.junit_sarif import as_junit, as_sarif

HOSTILE = "<script>alert('x')</script>\"onload=\"&]]>"
ORIGIN = Provenance(
    "0.1.0",
    "2.13.0",
    "3.11.7",
    "A CPU",
    "x86_64 amx",
    "isobit verify --html <p>",
    "2027-01-02T03:04:05Z",
    "e" * 32,
)
CAUGHT = Planted("order by batch", True, "12 of 64 elements differ")
MISSED = Planted("one ulp off", False, "64 compared, none differ")
CLAIMS = (
    ClaimRecord(
        "rows",
        "invariant",
        "kept",
        4,
        4,
        9,
        10_240,
        1000,
        planted=(CAUGHT,),
        proof=Proof("order", "K ≤ 4096", 7),
    ),
    ClaimRecord(
        "error",
        "accurate",
        "broken",
        1,
        3,
        4,
        65,
        2000,
        3,
        "3 of 64 differ",
        "isobit contract replay c-v1/error",
        (CAUGHT,),
    ),
    ClaimRecord(
        "same",
        "parity",
        "void",
        1,
        2,
        2,
        20,
        30,
        0,
        "not caught: one ulp off",
        planted=(CAUGHT, MISSED),
    ),
    ClaimRecord(
        "sums",
        "sums_to",
        "waived",
        0,
        2,
        detail="waived by Ann until 2027-01-01: slow; it is broken: 1 of 2",
    ),
    ClaimRecord(
        "other",
        "holds",
        "could-not-run",
        0,
        4,
        detail="no z3",
        proof=Proof("z3", "all k", 5, "k = 3"),
    ),
)


def status_of(id="c-v1", verdict="broken", claims=CLAIMS, depends_on=(), level=0, required=4):
    return ContractStatus(
        id, "1.0.0", "A title", "c.yaml", "d" * 32, verdict, level, required, depends_on, 1, claims
    )


TREE = (
    status_of(),
    status_of("base-v1", "kept", CLAIMS[:1], level=4),
    status_of("top-v1", "could-not-run", (), ("c-v1", "base-v1", "absent-v1")),
)
CONTRACT = """
id: c-v1
version: 1.0.0
title: A title
subject: isobit:linear
equations: {y: {formula: y = x + 1, domain: x in F}}
obligations: [{id: A-1, text: First, equation: y}, {id: A-2, text: Second}]
inputs: {plain: {arguments: {x: [rows]}, sizes: {rows: [1..9]}}}
claims:
  - {id: rows, obligations: [A-1, A-2], relation: invariant, under: [batch], inputs: plain, level: L2}
  - {id: never-judged, obligations: [A-2], relation: monotone, argument: x, inputs: plain, level: L2}
"""


class Text(HTMLParser):
    """The words between tags, and the tags."""

    def __init__(self, page):
        super().__init__()
        self.words, self.tags = [], []
        self.feed(page.partition("</style>")[2])
        self.text = " ".join("".join(self.words).split())

    def handle_data(self, data):
        self.words.append(data)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_summary_has_its_denominators():
    text = Text(draw_contracts(TREE, {}, "t")).text
    # Six records: five of c-v1, one of base-v1; two kept. Planted: 1 + 1 + 2 and 1 of base-v1.
    assert "contracts kept1 of 3" in text
    assert "claims kept2 of 6" in text
    assert "sabotage caught4 of 5" in text
    assert f"inputs{10_240 * 2 + 85:,}" in text
    assert "elements compared4,030of them differ3" in text


def test_every_claim_is_shown_with_its_evidence():
    page = draw_contracts(TREE[:1], {}, "t")
    text = Text(page).text
    for claim in CLAIMS:
        for words in (claim.claim, claim.verdict, claim.detail, claim.replay):
            assert words in text
    for words in (
        "caught order by batch",
        "missed one ulp off",
        "1 of 2 caught",
        "by z3, 5 cases; covers all k",
        "k = 3",
    ):
        assert words in text
    assert page.count('<div class="claim') == len(CLAIMS)


def test_words_come_with_records_and_a_claim_without_record_is_counted():
    sections = {"c-v1": explain(parse_contract(CONTRACT, "c.yaml"), status_of(claims=CLAIMS[:2]))}
    page = draw_contracts([status_of(claims=CLAIMS[:2])], sections, "t")
    text = Text(page).text
    assert "claims kept1 of 3" in text
    for words in (
        "y = x + 1",
        "on x in F",
        "bits of the output do not change under batch",
        "no evidence",
        "rows = 1..9",
    ):
        assert words in text
    # Under two obligations, shown once; `error` is in no section and shown all the same.
    assert page.count('<div class="claim') == 3
    assert text.count("shown above") == 1


def test_the_ladder_shows_reached_and_required_levels():
    page = draw_contracts([status_of(verdict="kept", level=2, required=3, claims=())], {}, "t")
    row = page.partition("<table>")[2].partition("</table>")[0]
    assert re.findall(r'<i class="([^"]*)"', row) == ["full", "full", "full", "required", ""]
    page = draw_contracts([status_of(verdict="unbound", claims=())], {}, "t")
    assert 'class="full' not in page


@pytest.mark.parametrize("verdict", ladder.VERDICTS)
def test_only_kept_is_green(verdict):
    row = draw_contracts([status_of(verdict=verdict, claims=())], {}, "t").partition(
        "<h2>The ladder"
    )[2]
    assert ('chip good">' in row) == (verdict == "kept")
    assert ('chip bad">' in row) == (verdict in ("broken", "void", "vacuous"))


def test_kept_on_too_few_rungs_is_not_kept():
    text = Text(draw_contracts([status_of(claims=(replace(CLAIMS[0], level=2),))], {}, "t")).text
    assert "claims kept0 of 1" in text
    assert "kept to L2 only" in text


def test_a_page_is_offline_and_escaped():
    proof = Proof(HOSTILE, HOSTILE, 1, HOSTILE)
    planted = (Planted(HOSTILE, False, HOSTILE),)
    claim = ClaimRecord(
        *[HOSTILE] * 3, 1, 2, detail=HOSTILE, replay=HOSTILE, planted=planted, proof=proof
    )
    bad = replace(
        status_of(HOSTILE, HOSTILE, (claim,), (HOSTILE,)),
        title=HOSTILE,
        path=HOSTILE,
        detail=HOSTILE,
    )
    kinds = ("about", "equation", "obligation", "claim", "inputs", "waiver", HOSTILE)
    words = [
        Section(HOSTILE, (HOSTILE, HOSTILE), kind, f"{HOSTILE}{i}") for i, kind in enumerate(kinds)
    ]
    for sections in ({}, {HOSTILE: words}):
        page = draw_contracts(
            [bad, replace(bad, version=HOSTILE, digest=HOSTILE)], sections, HOSTILE
        )
        found = Text(page)
        assert {tag for tag, _ in found.tags} & {"script", "img", "link", "iframe"} == set()
        assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
        assert found.text.count("<script>") > 10
        assert not re.search(r'(?:src|href)="(?!#)|url\(|@import', page)


def test_links_lead_to_places():
    tags = Text(draw_contracts(TREE, {}, "t")).tags
    places = {attributes["id"] for _, attributes in tags if "id" in attributes}
    links = {attributes["href"] for tag, attributes in tags if tag == "a"}
    assert links == {f"#{contract.id}" for contract in TREE}
    assert links == {f"#{place}" for place in places}


def test_nothing_to_show_is_a_page_too():
    assert "0 of 0" in Text(draw_contracts([], {}, "t")).text


# ---- graphs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", contract_graph.FORMATS)
def test_every_graph_names_every_contract(format):
    drawn = contract_graph.draw(format, TREE)
    assert all(contract.id in drawn and contract.verdict in drawn for contract in TREE)


def test_graphs_draw_the_edges_that_exist():
    mermaid = contract_graph.as_mermaid(TREE).splitlines()
    assert {line.strip() for line in mermaid if "-->" in line} == {"c2 --> c0", "c2 --> c1"}
    assert json.loads(contract_graph.as_json(TREE))[2]["depends_on"] == [
        "c-v1",
        "base-v1",
        "absent-v1",
    ]
    root = ElementTree.fromstring(contract_graph.as_svg(TREE))
    assert len(root.findall("{http://www.w3.org/2000/svg}line")) == 2


def test_ranks_follow_the_longest_way_and_end_at_a_circle():
    chain = [status_of(n, depends_on=d) for n, d in (("c", ("b", "a")), ("b", ("a",)), ("a", ()))]
    assert contract_graph.ranks_of(chain) == {"a": 0, "b": 1, "c": 2}
    circle = [status_of("a", depends_on=("b",)), status_of("b", depends_on=("a",))]
    assert set(contract_graph.ranks_of(circle)) == {"a", "b"}


# ---- exchange -------------------------------------------------------------------------------------------


def test_junit_counts_and_says_why():
    hostile = ClaimRecord("rows", "holds", "broken", 1, 2, detail=f"{HOSTILE}\x00\x1b[31m")
    root = ElementTree.fromstring(as_junit((*TREE, status_of("bad-v1", claims=(hostile,)))))
    suites = {suite.get("name"): suite for suite in root}
    assert [suites["c-v1"].get(key) for key in ("tests", "failures", "errors")] == ["5", "3", "1"]
    assert [suites["base-v1"].get(key) for key in ("tests", "failures", "errors")] == [
        "1",
        "0",
        "0",
    ]
    assert suites["top-v1"].get("errors") == "1"  # a contract without evidence is not a pass
    failure = suites["c-v1"].find("testcase[@name='error']/failure")
    assert "3 of 2,000 differ" in failure.text
    assert "isobit contract replay c-v1/error" in failure.text
    assert HOSTILE in suites["bad-v1"].find("testcase/failure").text


def test_sarif_names_what_is_not_kept():
    run = json.loads(as_sarif(TREE, ORIGIN))["runs"][0]
    levels = {result["ruleId"]: result["level"] for result in run["results"]}
    wrong = dict.fromkeys(("c-v1/error", "c-v1/same", "c-v1/other", "top-v1"), "error")
    assert levels == wrong | {"c-v1/sums": "note"}
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == set(levels)
    assert (
        run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "c.yaml"
    )
