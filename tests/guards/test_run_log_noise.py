"""Theorem: noise is no finding. A loss that falls under noise has no `rising-loss`, however it is logged; one that
rises by more than the noise has; a spike is found also while the last 128 entries have a descent.

1. Clean logs, and losses that rise.
2. Spikes after a descent; what is no spike.
3. A zero that stands for a loss that was not finite is not in the mean.
"""

import math

import numpy as np
import pytest

from isobit.guards.run_log import rules
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import hidden_spikes, judge_log
from tests.guards.noisy_logs import (
    LENGTHS,
    NOISES,
    TAILS,
    clean_logs_with,
    falling,
    findings,
    spikes_found,
)
from tests.guards.test_run_log import healthy, write_jsonl

# ---- 1. rises --------------------------------------------------------------------------------------------------


def test_noise_is_no_rising_loss():
    found, total = clean_logs_with(TAILS[0], 8)
    assert (dict(found), total) == ({}, 8 * len(LENGTHS) * len(NOISES))
    heavy, total = clean_logs_with(TAILS[1], 8)
    assert set(heavy) <= {"spike-loss"}
    assert heavy["spike-loss"] <= 0.15 * total


@pytest.mark.parametrize(("count", "every", "noise"), [(3000, 1, 0.3), (300, 10, 0.15)])
def test_a_rise_above_the_noise_is_found(count, every, noise):
    for seed in range(8):
        steps, losses = falling(count, every, noise, seed=seed)
        start = steps[count // 2]
        losses += 2 * np.clip((steps - start) / 500, 0, 1)
        (found,) = [step for rule, step in findings(steps, losses) if rule == "rising-loss"]
        assert start < found < start + 250


def test_a_rise_that_lasts_is_found_in_the_noise_of_a_hundred_steps(monkeypatch):
    def found():
        return sum("rising-loss" in {rule for rule, _ in findings(*each)} for each in logs)

    logs = [falling(600, 10, 0.15, seed=seed) for seed in range(8)]
    for _, losses in logs:
        losses[400:] *= 1.14
    assert found() == 8
    monkeypatch.setattr(rules, "RISE_WINDOWS", (100,))
    assert found() < 8


def test_one_spike_is_no_rising_loss():
    steps, losses = falling(200, 10, 0.05)
    losses[120] = 9.0
    assert findings(steps, losses) == [("spike-loss", 1210)]


def test_few_losses_are_not_judged_for_a_rise(tmp_path):
    path = write_jsonl(tmp_path / "log", [{"step": 100 * at, "loss": 2.0} for at in range(8)])
    assert "tell a rise from noise" in judge_log(read_log(path)).not_judged["rising-loss"]


# ---- 2. spikes -------------------------------------------------------------------------------------------------


def test_a_spike_after_a_descent_is_found():
    assert spikes_found(20, 8) == spikes_found(40, 8) == 8
    assert spikes_found(40, 8, at=80) == spikes_found(40, 8, at=198) == 8
    assert spikes_found(4, 8) == 0


def test_a_spike_of_several_entries_is_one_and_two_are_two():
    _, losses = falling(200, 10, 0.05)
    losses[110:113] += 2.0, 1.8, 1.0
    losses[140] += 2.0
    assert [place for place, _ in hidden_spikes(losses.tolist(), 200)] == [110, 140]


@pytest.mark.parametrize("change", [-1.0, 1.0])
def test_a_change_of_level_is_no_hidden_spike(change):
    for seed in range(8):
        _, losses = falling(200, 10, 0.05, seed=seed)
        losses[110:] += change
        assert list(hidden_spikes(losses.tolist(), 200)) == []


def test_hidden_spikes_do_not_depend_on_blocks(monkeypatch):
    _, losses = falling(3000, 1, 0.02)
    for place in range(70, 600, 60):
        losses[place] += 2.0
    wanted = list(hidden_spikes(losses.tolist(), 3000))
    assert len(wanted) > 3
    steps = falling(3000, 1)[0].tolist()
    points = rules.Curve(zip(steps, losses.tolist(), strict=True))
    means = rules.means_with_errors(points, 100)
    for lines in (16, 40):
        monkeypatch.setattr(rules, "ROWS", lines)
        assert repr(list(hidden_spikes(losses.tolist(), 3000))) == repr(wanted)
        assert rules.means_with_errors(points, 100) == means


def test_numbers_that_overflow_are_no_spikes():
    assert list(hidden_spikes([1.7e308, -1.7e308] * 100, 200)) == []
    assert list(hidden_spikes([0.0] * 200, 200)) == []


# ---- 3. zeros --------------------------------------------------------------------------------------------------


def test_a_hidden_zero_is_not_in_the_mean(tmp_path):
    rows = healthy(4000, every=10)
    rows[120] |= {"loss": 0.0, "grad_norm": math.nan}
    found = judge_log(read_log(write_jsonl(tmp_path / "log", rows))).findings
    assert {one.rule for one in found} == {"hidden-nonfinite", "nonfinite"}
    for row in rows[200:]:  # from a NaN on, a Trainer logs zeros to the end
        row |= {"loss": 0.0, "grad_norm": math.nan}
    log = read_log(write_jsonl(tmp_path / "log", rows))
    assert log.mean_loss[-1][0] == 1990
    assert min(value for _, value in log.mean_loss) > 1.9


def test_zeros_that_are_usual_stay_in_the_mean(tmp_path):
    rows = [{"step": step, "loss": float(step % 3 == 0)} for step in range(900)]
    log = read_log(write_jsonl(tmp_path / "log", rows))
    assert log.shown_loss == log.curves["loss"]
