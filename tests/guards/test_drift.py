"""Detectors are silent on healthy runs and find planted anomalies within a stated delay.

1. Real small runs, untouched: no false alarm, on losses and on gradient norms.
2. Anomalies planted at a known step of these runs: each is found, no later than stated, with its status.
3. Statuses, severities and odd curves: constant, zero, short, not finite.
The whole set, ten runs of 2,000 steps, is a `full` test; `python -m tests.guards.drift_curves` prints its figures.
"""

import math
import random

import pytest

from isobit import ArgumentError
from isobit.guards import Drift
from isobit.guards.live.drift import median_and_deviation
from isobit.guards.run_log.rules import alarms_of
from tests.guards.drift_curves import (
    ANOMALIES,
    AT,
    alarms,
    delay,
    healthy,
    language,
    planted,
    regression,
    run,
)

LATEST = {"spike": 0, "jump": 60, "ramp": 60, "noise": 30, "nan": 0}


@pytest.mark.parametrize("kind", [regression, language])
def test_healthy_runs_are_silent_and_anomalies_are_found(kind):
    losses, norms = run(kind, 0, AT + 100)
    assert alarms(losses) == []
    assert alarms(norms, log=True) == []
    for anomaly in ANOMALIES:
        found = delay(planted(losses, anomaly))
        assert found is not None, anomaly
        assert found <= LATEST[anomaly], anomaly


def test_a_learning_rate_that_is_too_large_is_an_error():
    losses, norms = run(regression, 0, 400, 300)
    assert 300 <= alarms(losses)[0][0] <= 310
    assert 300 <= alarms(norms, log=True)[0][0] <= 310
    detector = Drift()
    severities = {detector.add(value).severity for value in losses}
    assert severities == {"info", "warning", "error"}


@pytest.mark.full
def test_ten_runs():
    count, steps = healthy()
    assert steps == 20_000
    assert count == {"loss": 0, "norm": 0}
    for anomaly in ANOMALIES:
        for kind in (regression, language):
            for seed in range(5):
                found = delay(planted(run(kind, seed)[0], anomaly))
                assert found is not None, (anomaly, kind, seed)
                assert found <= LATEST[anomaly], (anomaly, kind, seed)


@pytest.mark.parametrize("curve", [[0.0] * 300, [2.5] * 300, [1e-8] * 300, [1.0], [-3.0] * 300])
def test_curves_without_noise(curve):
    assert alarms(curve) == []
    assert alarms(curve, log=True) == []


def test_what_is_not_finite_is_not_learnt():
    curve = [1 + 0.01 * (step % 5) for step in range(300)]
    curve[100], curve[101], curve[200] = math.nan, math.inf, -math.inf
    assert alarms(curve) == [(100, "nonfinite"), (101, "nonfinite"), (200, "nonfinite")]
    assert Drift().add(math.nan).severity == "error"


def test_a_shift_is_reported_once_and_a_second_one_again():
    level = [1 + (step >= 300) + 2 * (step >= 900) for step in range(1500)]
    found = alarms([value + 0.01 * (step % 7) for step, value in enumerate(level)])
    assert [status for _, status in found].count("shift") == 2
    assert [step >= AT - 300 for step, _ in found] == sorted(step >= AT - 300 for step, _ in found)


def curves_of_many_kinds():
    draw = random.Random(1)
    for kind in range(12):
        level = 2.0
        curve = []
        for step in range(1500):
            level += draw.choice((0, 0, 0, 0.001, -0.001)) * (kind % 4)
            noise = draw.gauss(0, 0.05) if kind % 3 else round(draw.gauss(0, 1.5)) * 0.01
            curve.append(level + noise + (draw.random() < 0.003) * draw.choice((1, 3, -2)))
            level += 0.5 * (step == 900)
        yield curve[: 1500 - kind]
    yield [1.0, 1.0, 2.0] * 300
    yield [1e308, -1e308, 0.0, 1e-320] * 100
    yield [1.0] * 400 + [2.0] * 400
    yield [math.exp(step / 100) for step in range(900)]
    yield []


@pytest.mark.parametrize("log", [False, True])
def test_alarms_of_a_curve_are_those_of_every_reading(log):
    """`alarms_of` runs the detector where an alarm may be; it misses none, and their scores are the same bits."""
    total = 0
    for curve in curves_of_many_kinds():
        detector, wanted = Drift(log=log), []
        for at, value in enumerate(curve):
            reading = detector.add(value)
            if reading.is_alarm:
                wanted.append((at, reading.status, reading.score))
        found = [(at, each.status, each.score) for at, each in alarms_of(curve, log=log)]
        assert found == wanted
        total += len(wanted)
    assert total > 50


def test_the_deviation_is_that_of_sorting():
    draw = random.Random(0)
    for size in (*range(1, 12), 127, 128):
        values = sorted(round(draw.gauss(0, 1), 1) for _ in range(size))
        middle, spread = median_and_deviation(values)
        assert middle == values[size // 2]
        assert spread == sorted(abs(value - middle) for value in values)[size // 2]


def test_limits_are_positive():
    for wrong in ({"spike": 0}, {"limit": -1.0}, {"limit": math.nan}):
        with pytest.raises(ArgumentError):
            Drift(**wrong)
