"""The commands about contracts: what they print, what they write, and their exit codes."""

import datetime
import html
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import isobit
from isobit.cli import main, verify
from isobit.contracts.store.sources import hash_text

CONTRACT = """
id: doubled-v1
version: 1.0.0
title: Twice the input
subject: doubling:{subject}
output: [rows, n]
equations:
  double: {{formula: y = 2x}}
obligations:
  - {{id: D-1, text: twice, equation: double}}
inputs:
  rows:
    arguments: {{x: [rows, n]}}
    sizes: {{rows: [3, 20], n: [4]}}
    rows: rows
claims:
  - id: exact
    obligations: [D-1]
    relation: parity
    against: doubling:reference
    inputs: rows
    level: L2
  - id: rows
    obligations: [D-1]
    relation: invariant
    under: [batch]
    inputs: rows
    level: L3
"""
SECOND = """
id: second-v1
version: 1.0.0
title: Rests on the first
subject: doubling:double
depends_on: [doubled-v1]
obligations:
  - {id: S-1, text: even}
inputs:
  rows: {arguments: {x: [rows, n]}, sizes: {rows: [3], n: [4]}, rows: rows}
claims:
  - {id: even, obligations: [S-1], relation: invariant, under: [threads], inputs: rows, level: L2}
"""
CODE = """
def double(x):
    return 2 * x

def by_batch(x):
    return 2 * x if len(x) < 10 else 2 * x + x * 2.0 ** -20

def reference(x):
    return x + x
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "doubling.py").write_text(CODE)
    (tmp_path / "doubled.contract.yaml").write_text(CONTRACT.format(subject="double"))
    (tmp_path / "second.contract.yaml").write_text(SECOND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "doubling", raising=False)
    yield tmp_path
    sys.modules.pop("doubling", None)


def run(*words):
    return main.main(list(words))


def test_totals_count_claims_of_contracts_that_are_too_many_for_a_table(place, capsys, monkeypatch):
    monkeypatch.setattr(verify, "FEW", 1)
    assert run("verify", "--trust", "doubling") == 0
    shown = capsys.readouterr().out
    assert "3 of 3 claims; sabotage caught" in shown
    assert "contract / claim" not in shown


def test_verify_then_nothing_then_exactly_the_dependents(place, capsys):
    assert run("verify", "--trust", "doubling") == 0
    assert (
        "2 of 2 contracts kept, 2 judged now; 3 of 3 claims; sabotage caught"
        in capsys.readouterr().out
    )
    assert run("verify", "--trust", "doubling") == 0
    assert "2 of 2 contracts kept, 0 judged now" in capsys.readouterr().out
    text = (place / "second.contract.yaml").read_text()
    (place / "second.contract.yaml").write_text(text.replace("text: even", "text: still even"))
    assert run("verify", "--trust", "doubling", "--changed", "--json") == 0
    assert [s["id"] for s in json.loads(capsys.readouterr().out)["contracts"]] == ["second-v1"]
    text = (place / "doubled.contract.yaml").read_text()
    (place / "doubled.contract.yaml").write_text(text.replace("Twice the", "Two times the"))
    assert run("verify", "--trust", "doubling", "--changed", "--json") == 0
    assert {s["id"] for s in json.loads(capsys.readouterr().out)["contracts"]} == {
        "doubled-v1",
        "second-v1",
    }


def test_broken_code_is_broken_and_so_is_what_rests_on_it(place, capsys):
    (place / "doubled.contract.yaml").write_text(CONTRACT.format(subject="by_batch"))
    words = ("--junit", "j.xml", "--sarif", "s.json", "--html", "p.html")
    assert run("verify", "--trust", "doubling", *words) == 1
    shown = capsys.readouterr().out
    assert "BROKEN doubled-v1/rows: " in shown
    assert "isobit contract replay doubled-v1/rows --case '{" in shown
    suites = ElementTree.parse("j.xml").getroot()
    assert [s.get("failures") for s in suites] == ["2", "0"]
    results = json.loads(Path("s.json").read_text())["runs"][0]["results"]
    assert {r["ruleId"] for r in results} >= {"doubled-v1/exact", "doubled-v1/rows"}
    assert "doubled-v1" in Path("p.html").read_text()
    assert run("contract", "status") == 1
    assert "depends on doubled-v1, which is broken" in " ".join(capsys.readouterr().out.split())
    assert run("contract", "replay", "doubled-v1/exact", "--trust", "doubling") == 1
    assert "differ" in capsys.readouterr().out
    assert run("contract", "replay", "second-v1/even", "--trust", "doubling") == 0


def test_untrusted_code_could_not_run(place, capsys):
    assert run("verify") == 2
    assert "--trust doubling" in capsys.readouterr().out
    assert "doubling" not in sys.modules
    assert run("verify", "--trust", "doubling") == 0  # what could not run is tried again
    assert run("verify", "--trust", "doubling", "--changed") == 0


def test_changed_shows_less_but_forgets_nothing(place, capsys):
    (place / "doubled.contract.yaml").write_text(CONTRACT.format(subject="by_batch"))
    assert run("verify", "--trust", "doubling") == 1
    assert run("verify", "--trust", "doubling", "--changed") == 1
    assert "0 judged now" in capsys.readouterr().out


def test_a_budget_of_no_time_settles_nothing(place, capsys):
    assert run("verify", "--trust", "doubling", "--seconds", "0") == 2
    assert run("verify", "--trust", "doubling") == 0
    assert "2 judged now" in capsys.readouterr().out


def test_shards_share_out_everything_once(place, capsys):
    seen = []
    for i in (1, 2, 3):
        run("verify", "--trust", "doubling", "--shard", f"{i}/3", "--json", "--level", "L2")
        seen += [s["id"] for s in json.loads(capsys.readouterr().out)["contracts"]]
    assert sorted(seen) == ["doubled-v1", "second-v1"]
    assert run("verify", "--shard", "4/3") == 2


def test_jobs(place, capsys):
    assert run("verify", "--trust", "doubling", "--jobs", "2") == 0
    assert "2 judged now" in capsys.readouterr().out


def test_status_graph_explain_lint(place, capsys):
    assert run("contract", "status") == 2  # nothing is known yet
    assert run("verify", "--trust", "doubling") == 0
    assert run("contract", "status", "--json") == 0
    assert run("contract", "lint") == 0
    capsys.readouterr()
    assert run("contract", "graph") == 0
    assert "second-v1  L2 kept  ← doubled-v1" in capsys.readouterr().out
    for format in ("mermaid", "json", "svg"):
        assert run("contract", "graph", "--format", format) == 0
        assert "doubled-v1" in capsys.readouterr().out
    assert run("contract", "explain", "doubled-v1") == 0
    shown = capsys.readouterr().out
    assert "y = 2x" in shown
    assert "caught" in shown


def test_what_only_reads_leaves_no_trace(place):
    before = sorted(place.iterdir())
    for words in (
        ["contract", "status"],
        ["contract", "lint"],
        ["contract", "explain", "doubled-v1"],
        ["contract", "graph"],
        ["contract", "explain", "nothing-v1"],
    ):
        run(*words)
    assert sorted(place.iterdir()) == before
    assert run("verify", "--trust", "doubling", "--level", "L2") == 0
    assert run("contract", "status") == 2
    assert (place / ".isobit" / "facts.json").exists()


def test_a_library_contract_replays_in_any_folder(tmp_path, monkeypatch, capsys):
    """verify prints the command where no contract file is needed, so it runs there too."""
    monkeypatch.chdir(tmp_path)
    assert run("verify", "silu-kernel-v1", "--subject", "stock", "--level", "L2", "--quiet") == 1
    command = re.search(r"isobit (contract replay silu-kernel-v1/.*)", capsys.readouterr().out)[1]
    assert run(*shlex.split(command)) == 1
    assert "differ" in capsys.readouterr().out


def test_lint_says_file_line_and_remedy(place, capsys):
    text = CONTRACT.format(subject="double").replace("relation: parity", "relation: parrity")
    (place / "doubled.contract.yaml").write_text(text)
    assert run("contract", "lint") == 1
    shown = capsys.readouterr().out
    assert "doubled.contract.yaml:19: expected contract.claims[0].relation" in shown
    assert "did you mean 'parity'?" in shown
    assert "expected dependencies that are known contracts; received doubled-v1" in shown
    assert run("contract", "lint", "--json") == 1
    assert json.loads(capsys.readouterr().out)[0]["line"] == 19
    assert run("verify", "--trust", "doubling") == 1


def test_schema_is_json(capsys):
    assert run("contract", "lint", "--schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert {"id", "obligations"} <= set(schema["required"])


def test_new_fails_until_filled(place, capsys):
    assert run("contract", "new", "mine-v1", "--from", "doubling:double") == 0
    assert run("contract", "new", "mine-v1", "--from", "doubling:double") == 2  # it is there
    assert run("verify", "mine-v1", "--trust", "doubling", "--level", "L2") in (1, 2)
    assert "doubling:reference_of_double" in capsys.readouterr().out


def test_the_pytest_plugin(place):
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    words += ["--isobit", "--isobit-level", "L2"]
    done = subprocess.run([*words, "--isobit-trust", "doubling"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    (place / "doubled.contract.yaml").write_text(CONTRACT.format(subject="by_batch"))
    done = subprocess.run([*words, "--isobit-trust", "doubling"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "isobit contract replay doubled-v1/rows" in done.stdout
    done = subprocess.run(words, capture_output=True, text=True)
    assert "--trust doubling" in done.stdout


def test_unknown_ids_and_empty_places(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("contract", "explain", "softmax-kernel-v2") == 2
    assert "did you mean 'softmax-kernel-v1'?" in capsys.readouterr().err
    assert run("contract", "replay", "softmax-kernel-v1/nothing") == 2
    assert run("contract", "status", str(tmp_path)) == 2
    for word in ("nosuch.yaml", "nosuch.yml", "no/such/folder"):
        capsys.readouterr()
        assert run("verify", word) == 2
        said = capsys.readouterr().err
        assert f"received: no such file: {word}" in said
        assert "softmax-kernel-v1" not in said  # not a list of ids


def test_errors_have_three_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("verify") == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("isobit verify: expected contract.yaml")
    assert second == "  received: none below ."
    assert third.startswith("  remedy: isobit contract new NAME")


def test_a_line_a_claim_off_a_terminal(place, capsys):
    assert run("verify", "--trust", "doubling", "--level", "L2") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"[\d.]+ s$", "", line) for line in lines] == [
        "[1/3] doubled-v1/exact: kept, ",
        "[2/3] doubled-v1/rows: kept, ",
        "[3/3] second-v1/even: kept, ",
    ]
    assert run("verify", "--trust", "doubling", "--level", "L2", "--again", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_every_report_says_where_it_comes_from(place, capsys):
    files = ("--html", "p.html", "--junit", "j.xml", "--sarif", "s.json")
    words = ("verify", "--trust", "doubling", "--level", "L2", "--json", *files)
    assert run(*words) == 0
    record = json.loads(capsys.readouterr().out)
    origin = record["provenance"]
    assert origin["command"] == shlex.join(["isobit", *words])
    assert origin["isobit"] == isobit.__version__
    assert (
        origin["torch"] == torch.__version__.partition("+")[0]
        or origin["torch"] == torch.__version__
    )
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(
        origin["date"]
    )
    assert datetime.timedelta(seconds=-1) < age < datetime.timedelta(minutes=5)
    assert origin["cpu"]
    assert origin["engine"]
    assert origin["digest"] == hash_text(*(status["digest"] for status in record["contracts"]))[:32]
    page, junit = Path("p.html").read_text(), Path("j.xml").read_text()
    sarif = json.loads(Path("s.json").read_text())["runs"][0]
    assert sarif["invocations"][0]["commandLine"] == origin["command"]
    for value in (origin[name] for name in ("command", "isobit", "torch", "date", "digest", "cpu")):
        assert html.escape(value) in page
        assert html.escape(value) in junit
        assert value in json.dumps(sarif["properties"])
    for format, start in (("svg", "<svg"), ("mermaid", "%%")):
        assert run("contract", "graph", "--format", format) == 0
        drawn = capsys.readouterr().out
        assert drawn.startswith(start)
        assert "isobit contract graph --format" in drawn
    assert run("contract", "status", "--json") == 2
    assert (
        json.loads(capsys.readouterr().out)["provenance"]["command"]
        == "isobit contract status --json"
    )


def test_an_invalid_file_that_was_not_asked_for_is_a_warning(place, capsys):
    """Ids name what is asked for; below a folder everything is."""
    verify = ("verify", "--trust", "doubling")
    assert run(*verify, "doubled-v1") == 0
    (place / "draft.contract.yaml").write_text("id: [not valid\n")
    capsys.readouterr()
    assert run(*verify, "doubled-v1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: another file is not valid" in said
    assert "draft.contract.yaml" in said
    assert "INVALID" not in said
    assert run("contract", "status", "doubled-v1") == 0
    assert run(*verify) == run("contract", "status") == 1
    assert "INVALID" in capsys.readouterr().out
    assert run(*verify, "drafted-v1") == 2
    assert "draft.contract.yaml, which is not valid" in " ".join(capsys.readouterr().err.split())
    same_id = (place / "doubled.contract.yaml").read_text()
    (place / "draft.contract.yaml").write_text(same_id)
    assert run(*verify, "doubled-v1") == 1
    assert "INVALID" in capsys.readouterr().out
