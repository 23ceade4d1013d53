"""Budgets of bricks: a good run keeps what it proposes; each planted regression breaks the claim that is about it."""

import json
from pathlib import Path

import pytest
import yaml

from isobit.cli.main import main
from isobit.errors import ArgumentError, ContractError
from isobit.profiling.budgets import RELATIONS, judge_budgets, propose, read_budgets
from isobit.profiling.trace import read_traces
from tests.profiling.synthetic import CORPUS, Chrome


def good_run():
    """Two steps on a GPU: products at a third of their bound, one pinned copy in, one ordered copy out."""
    chrome = Chrome()
    for number, at in ((1, 0), (2, 2000)):
        chrome.step(number, at, at + 2000)
        chrome.operator("aten::mm", at + 80, at + 110, [[512, 512], [512, 512]])
        chrome.copy("HtoD (Pinned -> Device)", at + 60, at + 90, 100_000, launched=at + 50)
        chrome.kernel("volta_sgemm", at + 110, at + 150, launched=at + 100)
        chrome.kernel("ncclDevKernel_AllReduce_Sum_f32", at + 150, at + 200, launched=at + 140)
        chrome.kernel("relu", at + 210, at + 1700, launched=at + 200)
        chrome.call("cudaStreamSynchronize", at + 1700, at + 1750)
        chrome.copy(
            "DtoH (Device -> Pinned)", at + 1800, at + 1900, 64, launched=at + 1790, stream=9
        )
    return chrome


def traces_of(chrome, folder, name="trace.json"):
    return read_traces([chrome.write(folder / name)])


def budgets_of(text, folder):
    path = folder / "bricks.yaml"
    path.write_text(text)
    return read_budgets(path)


def verdicts(chrome, budgets, folder):
    found = judge_budgets(budgets, traces_of(chrome, folder, "other.json"))
    return {claim.claim: claim.verdict for claim in found.claims}


def test_a_good_run_keeps_what_it_proposes(tmp_path):
    traces = traces_of(good_run(), tmp_path)
    found = judge_budgets(budgets_of(propose(traces), tmp_path), traces)
    assert found.verdict == "kept", found
    planted = [one for claim in found.claims for one in claim.planted]
    assert len(planted) >= 12
    assert all(one.caught for one in planted), planted
    names = {claim.relation for claim in found.claims}
    assert names == set(RELATIONS) - {"waiting"}  # one rank has nobody to wait for


def add_copy(chrome):
    chrome.copy("HtoD (Pinned -> Device)", 95, 100, 10, launched=52)


def make_pageable(chrome):
    for event in chrome.events:
        event["name"] = event["name"].replace("(Pinned -> Device)", "(Pageable -> Device)")


def enlarge_copy(chrome):
    next(e for e in chrome.events if "HtoD" in e["name"])["args"]["bytes"] = 200_000


def stretch_kernel(chrome):
    next(e for e in chrome.events if e["name"] == "volta_sgemm")["dur"] = 90


def remove_wait(chrome):
    chrome.events = [e for e in chrome.events if e["name"] != "cudaStreamSynchronize"]


def add_wait(chrome):
    chrome.call("cudaStreamSynchronize", 1751, 1752)


def add_communication(chrome):
    chrome.kernel("ncclDevKernel_AllReduce_Sum_f32", 1900, 1990, launched=1890)


def recompile(chrome):
    chrome.add("python_function", "torch/_dynamo/convert_frame.py(1): compile", 20, 40)


REGRESSIONS = {
    add_copy: "C-GPUTRAIN-002",
    make_pageable: "C-GPUTRAIN-002",
    enlarge_copy: "C-GPUTRAIN-002",
    stretch_kernel: "TIME-2",
    remove_wait: "C-STREAMSYNC-001",
    add_wait: "HOST-WAITS",
    add_communication: "COMM",
    recompile: "COMPILATIONS",
}


@pytest.mark.parametrize(("plant", "claim"), REGRESSIONS.items())
def test_each_planted_regression_breaks_its_budget(plant, claim, tmp_path):
    budgets = budgets_of(propose(traces_of(good_run(), tmp_path)), tmp_path)
    assert set(verdicts(good_run(), budgets, tmp_path).values()) == {"kept"}
    wrong = good_run()
    plant(wrong)
    found = verdicts(wrong, budgets, tmp_path)
    assert found[claim] == "broken", found


def test_three_transfers_a_step(tmp_path):
    # C-GPUTRAIN-002 of the seed: three copies to the device per step.
    text = "id: a\nclaims:\n  - {id: C-GPUTRAIN-002, relation: transfers, where: {direction: HtoD}, per_step: 3}\n"
    budgets = budgets_of(text, tmp_path)
    chrome = good_run()
    add_copy(chrome)
    add_copy(chrome)
    assert verdicts(chrome, budgets, tmp_path) == {"C-GPUTRAIN-002": "kept"}
    add_copy(chrome)
    assert verdicts(chrome, budgets, tmp_path) == {"C-GPUTRAIN-002": "broken"}


def test_what_matches_nothing_is_vacuous(tmp_path):
    text = (
        "id: a\nclaims:\n  - {id: A, relation: transfers, where: {direction: PtoP}, per_step: 3}\n"
    )
    text += "  - {id: B, relation: time, where: {operator: 'aten::bmm'}, ms_per_step: 1}\n"
    text += "  - {id: C, relation: waiting, at_most: 0.1}\n"
    found = verdicts(good_run(), budgets_of(text, tmp_path), tmp_path)
    assert found == {"A": "vacuous", "B": "vacuous", "C": "vacuous"}


def test_a_limit_that_cannot_be_exceeded_is_void(tmp_path):
    text = "id: a\nclaims:\n  - {id: A, relation: share, where: {of: idle}, at_most: 1}\n"
    text += "  - {id: B, relation: share, where: {of: compute}, at_least: 0}\n"
    text += "  - {id: C, relation: of_bound, where: {operator: 'aten::mm'}, at_least: 0}\n"
    found = verdicts(good_run(), budgets_of(text, tmp_path), tmp_path)
    assert found == {"A": "void", "B": "void", "C": "void"}


def test_waiting_cannot_be_judged_from_some_of_the_ranks(tmp_path):
    chrome = good_run()
    chrome.header["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 8}
    text = "id: a\nclaims:\n  - {id: RANKS, relation: waiting, at_most: 0.1}\n"
    assert verdicts(chrome, budgets_of(text, tmp_path), tmp_path) == {"RANKS": "could-not-run"}
    assert (
        main(["profile", str(tmp_path / "other.json"), "--contract", str(tmp_path / "bricks.yaml")])
        == 2
    )


def test_waiting_for_a_late_rank(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()

    def ranks(late):
        for rank in (0, 1):
            chrome = Chrome(rank, 2)
            chrome.step(1, 0, 1000)
            start = 100 + late * (rank == 1)
            chrome.kernel("mm", 10, start)
            chrome.kernel("ncclDevKernel_AllReduce_Sum_f32", start, 120 + late, launched=start)
            chrome.kernel("mm", 130 + late, 990)
            chrome.write(folder / f"rank{rank}.json")
        return read_traces([folder])

    text = "id: a\nclaims:\n  - {id: RANKS, relation: waiting, at_most: 0.03}\n"
    budgets = budgets_of(text, tmp_path)
    right = judge_budgets(budgets, ranks(0))
    assert (right.verdict, right.claims[0].planted[0].caught) == ("kept", True)
    wrong = judge_budgets(budgets, ranks(300))
    assert wrong.verdict == "broken"
    assert "most for rank 1" in wrong.claims[0].detail


WRONG_FILES = {
    "claims: []": "the key id",
    "id: a\nclaims: []": "at least one claim",
    "id: a\nclaims:\n  - {id: A, relation: speed}": "a relation",
    "id: a\nclaims:\n  - {id: A, relation: waiting}": "a limit of waiting",
    "id: a\nclaims:\n  - {id: A, relation: waiting, at_most: -1}": "not negative",
    "id: a\nclaims:\n  - {id: A, relation: waiting, at_most: .nan}": "not negative",
    "id: a\nclaims:\n  - {id: A, relation: waiting, at_most: 0.1, at_mots: 1}": "one of",
    "id: a\nclaims:\n  - {id: A, relation: share, where: {of: idel}, at_most: 0.1}": "of: idle",
    "id: a\nclaims:\n  - {id: A, relation: transfers, per_step: 3}": "where",
    "id: a\nclaims:\n  - {id: A, relation: waiting, at_most: 1}\n  - {id: A, relation: waiting, at_most: 1}": "once",
    "id: a\nclaims:\n  - !!python/object/apply:os.system ['true']": "tags",
    "[1": "YAML",
}


@pytest.mark.parametrize(("text", "words"), WRONG_FILES.items())
def test_a_wrong_file_names_its_line(text, words, tmp_path):
    with pytest.raises((ArgumentError, ContractError), match=words):
        budgets_of(text, tmp_path)


def test_the_command_has_exit_codes_junit_and_sarif(tmp_path, capsys):
    trace = good_run().write(tmp_path / "trace.json")
    budgets = tmp_path / "bricks.yaml"
    assert main(["profile", str(trace), "--propose", str(budgets)]) == 0
    assert yaml.safe_load(budgets.read_text())["id"] == "train-step-bricks-v1"
    junit, sarif = tmp_path / "bricks.xml", tmp_path / "bricks.sarif"
    words = [
        "profile",
        str(trace),
        "--contract",
        str(budgets),
        "--junit",
        str(junit),
        "--sarif",
        str(sarif),
    ]
    assert main(words) == 0
    number = len(yaml.safe_load(budgets.read_text())["claims"])
    assert f"kept: {number} of {number} budgets kept" in capsys.readouterr().out
    assert 'failures="0"' in junit.read_text()
    assert json.loads(sarif.read_text())["runs"][0]["results"] == []
    wrong = good_run()
    remove_wait(wrong)
    wrong.write(trace)
    assert main(words) == 1
    assert 'failures="1"' in junit.read_text()
    (result,) = json.loads(sarif.read_text())["runs"][0]["results"]
    assert result["ruleId"] == "train-step-bricks-v1/C-STREAMSYNC-001"
    assert main(["profile", str(trace), "--junit", str(junit)]) == 2
    assert main(["profile", str(trace), "--contract", str(tmp_path / "none.yaml")]) == 2


@pytest.mark.full
@pytest.mark.skipif(not CORPUS.exists(), reason="the folder of real traces is not there")
@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.glob("*.gz")))
def test_real_traces_keep_what_they_propose(name, tmp_path):
    traces = read_traces([Path(CORPUS) / name])
    found = judge_budgets(budgets_of(propose(traces), tmp_path), traces)
    assert found.verdict == "kept", [c for c in found.claims if c.verdict != "kept"]
