"""Learning rates of a log against the configuration: right ones are silent, each planted fault is found and named.

1. transformers' own schedules are what is computed here.
2. Right logs: every kind, logged before or after the update, rounded, of every tenth step.
3. Planted: another warm-up, kind, length, peak; what the rates fit instead is said.
4. What a configuration does not say is not judged, with the reason; hostile ones too.
"""

import json
import math

import pytest

from isobit.cli.main import main
from isobit.guards.run_log.curves import Rows
from isobit.guards.run_log.rules import Limits, NotJudged, Schedule, judge_log, schedule_in
from tests.guards.test_run_log import healthy, write_jsonl
from tests.guards.test_run_log_forms import write_database

STEPS = 1000
CONFIG = {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 100,
    "max_steps": STEPS,
}


def log_of(schedule, shift=0, every=1, digits=None):
    rows = Rows()
    for step in range(0, STEPS, every):
        rate = schedule.rate(step + shift)
        rate = float(f"{rate:.{digits}e}") if digits else rate
        rows.add({"step": step, "loss": 1.0, "learning_rate": rate})
    return rows.as_log("log", "jsonl")


def found(log, config):
    verdict = judge_log(log, Limits(config=config))
    assert "schedule" in verdict.judged, verdict.not_judged
    return [finding for finding in verdict.findings if finding.rule == "schedule"]


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_transformers_schedules(kind):
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=7, num_training_steps=50)
    ours = schedule_in({"lr": "3e-4", "schedule": kind, "warmup_steps": 7, "max_steps": 50})
    for step in range(50):
        assert math.isclose(ours.rate(step), scheduler.get_last_lr()[0], abs_tol=1e-18)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("more", [{}, {"shift": -1}, {"shift": 1}, {"every": 10}, {"digits": 2}])
def test_a_right_log_is_silent(kind, more):
    warmup = 0 if kind == "constant" else 100
    config = CONFIG | {"lr_scheduler_type": kind}
    assert found(log_of(Schedule(kind, 3e-4, warmup, STEPS), **more), config) == []


RIGHT = Schedule("cosine", 3e-4, 100, STEPS)
# name -> what was logged, first step, words
PLANTS = {
    "no warm-up": (Schedule("cosine", 3e-4, 0, STEPS), 0, "no warm-up"),
    "linear": (Schedule("linear", 3e-4, 100, STEPS), None, "linear, 100 steps of warm-up"),
    "constant": (Schedule("constant", 3e-4, 100, STEPS), None, "constant, 100 steps"),
    "scaled": (Schedule("cosine", 24e-4, 100, STEPS), 2, "8 times the configured"),
    "shorter": (Schedule("cosine", 3e-4, 100, 500), None, ""),
    "twice": (Schedule("cosine", 3e-4, 50, STEPS // 2), 3, ""),
    "floor": (Schedule("cosine", 3e-4, 100, STEPS, 3e-5), None, ""),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_schedule_is_found(name):
    logged, step, words = PLANTS[name]
    (finding,) = found(log_of(logged), CONFIG)
    assert finding.severity == "error"
    assert step is None or abs(finding.step - step) <= 1
    assert finding.step <= 400
    assert words in finding.message
    assert "of 1000 entries differ" in finding.message
    assert (words != "") == ("they " in finding.message)


def test_a_floor_and_a_ratio_of_the_configuration():
    logged = Schedule("cosine", 3e-4, 100, STEPS, 3e-5)
    nested = {
        "optimizer": {"lr": 3e-4},
        "scheduler": {"name": "x"},
        "train": CONFIG | {"min_lr": 3e-5},
    }
    assert found(log_of(logged), nested) == []
    for ratio in ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}):
        assert found(log_of(RIGHT), CONFIG | ratio) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lr_scheduler_type": None}, "no lr_scheduler_type"),
        ({"lr_scheduler_type": "polynomial"}, "'polynomial', of constant"),
        ({"learning_rate": "high"}, "no usable learning_rate"),
        ({"learning_rate": 0}, "no usable learning_rate"),
        ({"learning_rate": math.inf}, "no usable peak"),
        ({"max_steps": -1}, "neither the configuration nor the log has max_steps"),
        ({"max_steps": [1]}, "neither the configuration nor the log has max_steps"),
    ],
)
def test_what_is_not_said_is_not_judged(change, reason):
    verdict = judge_log(log_of(RIGHT), Limits(config=CONFIG | change))
    assert reason in verdict.not_judged["schedule"]
    with pytest.raises(NotJudged):
        schedule_in(CONFIG | change)
    assert schedule_in(CONFIG | {"max_steps": -1}, STEPS) == RIGHT


def test_the_command_prints_the_causes_of_the_contract(tmp_path, capsys):
    rows = [row | {"learning_rate": RIGHT.rate(row["step"])} for row in healthy(STEPS)]
    log = write_jsonl(tmp_path / "log.jsonl", rows)
    (tmp_path / "args.json").write_text(json.dumps(CONFIG))
    (tmp_path / "args.yaml").write_text("lr: 3e-4\nschedule: cosine\nmax_steps: 1000\n")
    assert main(["runlog", str(log), "--config", str(tmp_path / "args.json")]) == 0
    assert "9 of 11 rules judged" in capsys.readouterr().out
    assert main(["runlog", str(log), "--config", str(tmp_path / "args.yaml"), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["logs"][0]["findings"]
    assert finding["rule"] == "schedule"
    assert "per micro-batch or per rank" in finding["causes"]
    assert main(["runlog", str(log), "--config", str(log / "no")]) == 2


def test_the_parameters_of_a_run_of_mlflow_are_its_configuration(tmp_path, capsys):
    rows = [row | {"learning_rate": RIGHT.rate(row["step"])} for row in healthy(STEPS)]
    good = write_database(tmp_path / "good.db", rows, params=CONFIG)
    bad = write_database(tmp_path / "bad.db", rows, params=CONFIG | {"warmup_steps": 300})
    assert main(["runlog", str(good)]) == 0
    assert main(["runlog", str(bad)]) == 1
    assert "300 steps of warm-up" in " ".join(capsys.readouterr().out.split())
