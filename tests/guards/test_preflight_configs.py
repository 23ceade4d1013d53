"""Declarations and configurations of a preflight, and its page.

1. Declarations: each key has a wrong and a right program; unknown keys and wrong kinds are refused.
2. Configurations: YAML, JSON, TOML; a pickle, an alias bomb and broken files are refused.
3. The page escapes what it shows and says what was not checked.
4. What the process of a script writes is read back field by field; anything else is refused.
"""

import itertools
import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isobit import ArgumentError
from isobit.guards import PreflightFinding, PreflightReport, preflight
from isobit.guards.config_file import read_config
from isobit.guards.trial_run.page import write_preflight_page
from isobit.guards.trial_run.starting import read_outcome, write_outcome
from tests.guards.preflight_programs import adam_with_warm_up_and_groups, loop, plain, sgd

# ---- 1. declarations ---------------------------------------------------------------------------------------


def tied(wrong):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    if not wrong:
        model[1].weight = model[0].weight
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


def partly_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    loop(model, sgd(model))


@pytest.mark.parametrize(
    ("program", "declared", "rules"),
    [
        (partly_frozen, {"frozen": ["0.*"]}, set()),
        (plain, {"frozen": ["0.*"]}, {"not-frozen"}),  # mmpretrain-702
        (partly_frozen, {"frozen": ["encoder.*"]}, {"not-frozen"}),
        (lambda: tied(False), {"tied": [["0.weight", "1.weight"]]}, set()),
        (lambda: tied(True), {"tied": [["0.weight", "1.weight"]]}, {"not-tied"}),
        (lambda: tied(False), {"tied": [["0.weight", "2.weight"]]}, {"not-tied"}),
        (plain, {"hyperparameters": {"lr": 0.01}}, set()),
        (plain, {"hyperparameters": {"lr": 0.1}}, {"hyperparameter"}),
        (plain, {"global_batch_size": 4}, set()),
        (plain, {"global_batch_size": 8}, {"count"}),
    ],
)
def test_declarations(program, declared, rules):
    report = preflight(program, declare=declared)
    assert {finding.rule for finding in report.findings} == rules


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"froze": []},
        {"frozen": "0.*"},
        {"frozen": [1]},
        {"tied": [["a"]]},
        {"tied": "a"},
        {"hyperparameters": {"rate": 1}},
        {"hyperparameters": {"lr": "fast"}},
        {"hyperparameters": [1]},
        {"global_batch_size": 0},
        {"global_batch_size": True},
    ],
    ids=str,
)
def test_declarations_that_are_refused(declared):
    with pytest.raises(ArgumentError, match="declaration"):
        preflight(plain, declare=declared)


# ---- 2. configurations -------------------------------------------------------------------------------------


BOMB = "a: &a [1, 1]\n" + "".join(  # each line is ten of the line before
    f"{new}: &{new} [{', '.join(10 * ['*' + old])}]\n" for old, new in itertools.pairwise("abcdefg")
)


def test_configurations_are_read(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 1e-2\n2: [1, null]\nwhen: 2026-01-01\n")
    assert read_config(tmp_path / "a.yaml") == {
        "lr": "1e-2",
        "2": [1, None],
        "when": "2026-01-01",
    }
    (tmp_path / "a.json").write_text('{"bf16": {"enabled": true}}')
    assert read_config(tmp_path / "a.json") == {"bf16": {"enabled": True}}
    (tmp_path / "a.toml").write_text("[optimizer]\nlr = 3e-4\n")
    if sys.version_info >= (3, 11):
        assert read_config(tmp_path / "a.toml") == {"optimizer": {"lr": 3e-4}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("training_args.bin", "x"),
        ("a.yaml", "- 1"),
        ("a.yaml", "a: [1"),
        ("a.yaml", "!!python/object/apply:os.getcwd []"),
        ("a.yaml", BOMB),
        ("a.toml", "lr ="),
    ],
    ids=["pickle", "list", "broken", "code", "aliases", "toml"],
)
def test_configurations_that_are_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError):
        read_config(tmp_path / name)


def test_a_warm_up_must_have_begun():
    config = {"lr": 0.01, "warmup_steps": 100}
    (found,) = preflight(plain, config=config).findings
    assert found.rule == "no-warm-up"
    assert "step 0 is 0.01 already" in found.message
    config = {"lr": 0.01, "betas": [0.9, 0.95], "warmup_steps": 2}
    assert preflight(adam_with_warm_up_and_groups, config=config).is_clean


def test_bf16_of_a_configuration_must_have_run():
    found = preflight(plain, config={"bf16": True}).findings
    assert [finding.rule for finding in found] == ["autocast-without-effect"]
    assert preflight(plain, config={"bf16": False, "fp16": {"enabled": "auto"}}).is_clean


# ---- 3. the page -------------------------------------------------------------------------------------------


ONE = PreflightFinding("not-tied", "error", "a & b", 1, "<b>", (0,))
REPORT = PreflightReport(
    steps=3,
    models=1,
    parameters=4,
    findings=(ONE,),
    judged=("one",),
    not_judged={"two": "because <i>"},
    dtypes={"Linear": {"float32": 2}},
    ranks=2,
    notes=(PreflightFinding("default", "info", "a note", steps=(1, 2, 3, 5)),),
)


def test_the_page():
    page = write_preflight_page("<script>.py", REPORT)
    verdict = (
        "1 finding by 1 of 2 checks, on 2 ranks, 3 steps, 1 model, 4 parameters; not judged: two"
    )
    assert verdict in page
    assert "&lt;b&gt;: a &amp; b" in page
    assert "not made: because &lt;i&gt;" in page
    assert "<script>.py" not in page
    clean = write_preflight_page("a.py", replace(REPORT, findings=()))
    assert "<p>Nothing.</p>" in clean
    assert "clean" not in clean  # one of two checks was made
    whole = write_preflight_page("a.py", replace(REPORT, findings=(), not_judged={}))
    assert "clean by 1 of 1 checks" in whole


# ---- 4. from the script's process --------------------------------------------------------------------------


def test_a_report_and_an_error_are_read_back_as_they_were_written(tmp_path):
    path = tmp_path / "outcome.json"
    write_outcome(str(path), REPORT)
    assert read_outcome(path) == REPORT
    assert read_outcome(path).notes[0].in_steps == "1-3, 5"
    write_outcome(str(path), ArgumentError(expected="a", received="b", remedy="c"))
    with pytest.raises(ArgumentError) as raised:
        read_outcome(path)
    error = raised.value
    assert (error.expected, error.received, error.remedy) == ("a", "b", "c")


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": "three"},
        {"findings": [{"rule": "x"}]},
        {"judged": [1]},
        {"not_judged": ["two"]},
        {"dtypes": {"Linear": 2}},
        {"more": 1},
    ],
    ids=str,
)
def test_what_the_script_wrote_over_its_report_is_refused_by_its_field(tmp_path, wrong):
    path = tmp_path / "outcome.json"
    write_outcome(str(path), REPORT)
    found = json.loads(path.read_text())
    found["report"] |= wrong
    path.write_text(json.dumps(found))
    with pytest.raises(ArgumentError, match=f"outcome.report.*{next(iter(wrong))}|received: more"):
        read_outcome(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"error": {}}', '{"error": {"a": "b"}}', "[" * 9999]
)
def test_a_file_that_is_no_outcome_is_refused(tmp_path, text):
    path = tmp_path / "outcome.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="outcome"):
        read_outcome(path)
