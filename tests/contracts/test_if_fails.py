"""`if_fails` of a claim: shown wherever a broken claim is, and nowhere else; it is no part of evidence.

1. The language: a text of 1 to 1,000 characters; everything else is refused, by the loader and by the schema.
2. A broken claim: terminal, JSON, JUnit, SARIF, HTML, explain and pytest show it, hostile text as text.
3. The right twin: a kept claim shows it in explain alone. A waived one shows why it is broken.
"""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from isobit.cli.main import main
from isobit.contracts.language.load import json_schema, parse_contract
from isobit.contracts.store import ladder
from isobit.contracts.store.evidence import LINE
from isobit.errors import ContractError
from isobit.foundation.records import ClaimRecord
from tests.contracts.test_contract_schema import accepts

CAUSES = "A sum in fp16 <b>; look at [red]the last axis[/red] first"
TEXT = """id: twice-v1
version: 1.0.0
title: Doubles
subject: doubles:{subject}
obligations: [{{id: D-1, text: doubles}}]
inputs:
  plain: {{arguments: {{x: [rows, 4]}}, sizes: {{rows: [3]}}, rows: rows}}
claims:
  - id: double
    obligations: [D-1]
    relation: parity
    against: doubles:right
    inputs: plain
    level: L2
    sabotage: ["doubles:wrong"]
    if_fails: {causes}
"""
DOUBLES = "def right(x): return 2 * x\ndef wrong(x): return 3 * x\n"


def write(folder, subject="wrong"):
    (folder / "doubles.py").write_text(DOUBLES)
    path = folder / "twice.contract.yaml"
    path.write_text(TEXT.format(subject=subject, causes=json.dumps(CAUSES)))
    return path


# ---- 1. the language ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "causes", ["''", "'  '", "3", "true", "null", "[a, b]", "{a: b}", f"'{'x' * 1001}'", "!!str x"]
)
def test_hostile_values_are_refused(causes):
    with pytest.raises(ContractError) as caught:
        parse_contract(TEXT.format(subject="right", causes=causes), "twice")
    assert caught.value.line == 16
    assert "if_fails" in caught.value.expected or "tag" in str(caught.value)


def test_the_schema_refuses_what_the_loader_refuses():
    schema = json_schema()["properties"]["claims"]["items"]["oneOf"][0]["properties"]["if_fails"]
    assert accepts(schema, CAUSES) == ""
    assert accepts(schema, ["a"]) != ""
    assert (schema["minLength"], schema["maxLength"]) == (1, 1000)


def test_a_long_text_is_read_whole():
    contract = parse_contract(TEXT.format(subject="right", causes="x" * 1000), "twice")
    assert contract.claims[0].if_fails == "x" * 1000
    assert "if_fails" not in contract.claims[0].params


def test_evidence_has_no_causes():
    assert "if_fails" not in LINE


# ---- 2. a broken claim -------------------------------------------------------------------------------------


@pytest.fixture
def shown(request, tmp_path, capsys, monkeypatch):
    """What every command says of a claim on the subject that a test names."""
    path = write(tmp_path, request.param)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        main([*words, str(path)])
        return capsys.readouterr().out

    reports = ["--junit", "j.xml", "--sarif", "s.json", "--html", "p.html"]
    found = {"terminal": run("verify", "--trust", "doubles", *reports)}
    found["json"] = run("verify", "--trust", "doubles", "--json")  # from evidence: nothing is run
    found["explain"] = run("explain")
    return found | {name: (tmp_path / name).read_text() for name in ("j.xml", "s.json", "p.html")}


@pytest.mark.parametrize("shown", ["wrong"], indirect=True)
def test_a_broken_claim_says_what_to_look_at(shown):
    assert f"likely causes: {CAUSES}" in shown["terminal"]
    assert json.loads(shown["json"])["contracts"][0]["claims"][0]["if_fails"] == CAUSES
    assert f"if it fails: {CAUSES}" in " ".join(shown["explain"].split())
    failure = ElementTree.fromstring(shown["j.xml"]).find(".//failure")
    assert f"likely causes: {CAUSES}" in failure.text
    run = json.loads(shown["s.json"])["runs"][0]
    assert f"likely causes: {CAUSES}" in run["results"][0]["message"]["text"]
    assert run["tool"]["driver"]["rules"][0]["help"]["text"] == CAUSES
    assert "<b>Likely causes:</b> A sum in fp16 &lt;b&gt;" in shown["p.html"]


# ---- 3. a kept claim ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", ["right"], indirect=True)
def test_a_kept_claim_says_it_in_explain_alone(shown):
    assert "1 of 1 claims" in shown["terminal"]
    assert json.loads(shown["json"])["contracts"][0]["claims"][0]["if_fails"] == ""
    assert f"if it fails: {CAUSES}" in " ".join(shown["explain"].split())
    for name in ("terminal", "j.xml", "s.json", "p.html"):
        assert "ikely causes" not in shown[name]


def test_other_verdicts_have_no_causes():
    contract = parse_contract(TEXT.format(subject="right", causes="look"), "twice")
    record = ClaimRecord("double", "parity", "kept", 2, 2, if_fails="")
    for verdict in ladder.VERDICTS:
        told = ladder.with_causes(contract, ClaimRecord("double", "parity", verdict, 1, 2))
        assert told.if_fails == ("look" if verdict == "broken" else "")
    assert ladder.with_causes(contract, record) == record


@pytest.mark.full
def test_pytest_shows_it(tmp_path):
    write(tmp_path)
    command = [sys.executable, "-m", "pytest", "--isobit", "--isobit-trust", "doubles", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert f"likely causes: {CAUSES}" in done.stdout


def test_a_waived_claim_keeps_its_causes(tmp_path, capsys, monkeypatch):
    path = write(tmp_path)
    waiver = "waivers: [{claim: double, reason: later, owner: me, expires: 2999-01-31}]\n"
    path.write_text(path.read_text() + waiver)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", str(path), "--trust", "doubles", "--json", "--quiet"]) == 1
    claim = json.loads(capsys.readouterr().out)["contracts"][0]["claims"][0]
    assert (claim["verdict"], claim["if_fails"]) == ("waived", CAUSES)
