"""A training configuration is accepted if and only if the run gets everywhere.

On small numbers the rules agree with a run that is walked step by step, and every planted wrong acceptance breaks its
promise by real integers. training-config-kernel-v1 proves the promises for all integers.
"""

import math
from dataclasses import fields, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.contracts.judge.proofs.integers import prove
from isobit.errors import ArgumentError
from isobit.guards import training_config as tc
from isobit.guards.training_config import TrainingConfig, accepts, accepts_counts, check_training
from isobit.library.training_config import (
    ALL_INTEGERS,
    ENDED_EARLY,
    MENDED,
    PLANTED,
    PROMISES,
)

NAMES = [f.name for f in fields(TrainingConfig)]


def configs(low=1):
    small = {name: st.integers(low, 12) for name in NAMES}
    small |= {"sequences": st.integers(low, 40), "warmup_steps": st.integers(min(low, 0), 4)}
    return st.builds(TrainingConfig, **(small | {"sequence_length": st.integers(low, 40)}))


def walk(config):
    """The run, step by step: the tokens of each step and its learning rate in parts of the peak."""
    tokens = []
    for _ in range(config.epochs):
        left = config.sequences
        while left >= config.batch_size * config.accumulation and len(tokens) < config.max_steps:
            left -= config.batch_size * config.accumulation
            tokens.append(config.batch_size * config.accumulation * config.sequence_length)
    warmup, rates = config.warmup_steps, []
    for t in range(len(tokens)):
        if t < warmup:
            rates.append(t / warmup)
        else:
            rates.append((1 + math.cos(math.pi * (t - warmup) / (len(tokens) - warmup))) / 2)
    return tokens, rates


@given(configs())
def test_rules_agree_with_a_run_walked_step_by_step(config):
    tokens, rates = walk(config)
    assert tc.actual_steps(config) == len(tokens)
    assert tc.total_tokens(config) == sum(tokens)
    assert tc.peak_step(config) == (rates.index(1.0) if 1.0 in rates else None)
    assert rates.count(1.0) <= 1
    walked = {
        "positive": True,
        "steps-per-epoch": len(tokens) >= 1,
        "reachable": len(tokens) == config.max_steps,
        "warmup-completes": len(tokens) > config.warmup_steps,
        "warmup-short": config.warmup_steps * 10 <= len(tokens),
        "peak-reached": 1.0 in rates,
        "tokens": sum(tokens) >= 10 * config.parameters,
    }
    assert {name: rule(config) for name, rule in tc.RULES.items()} == walked
    assert [f.rule for f in check_training(config)] == [
        name for name, kept in walked.items() if not kept
    ]
    assert accepts(config) == all(walked.values())


@given(configs(low=-2))
def test_accepted_is_without_findings(config):
    assert accepts(config) == (check_training(config) == ()) == accepts_counts(**vars(config))
    for promise in PROMISES.values():
        assert promise(accepts_counts, **vars(config))


@given(configs())
def test_min_epochs_is_the_least_that_reaches(config):
    if tc.steps_per_epoch(config) < 1:
        with pytest.raises(ArgumentError, match="add sequences"):
            tc.min_epochs(config)
        return
    least = tc.min_epochs(config)
    assert tc.RULES["reachable"](replace(config, epochs=least))
    assert not tc.RULES["reachable"](replace(config, epochs=least - 1))


def test_min_epochs_is_the_least_for_all_integers():
    def least(**counts):
        config = TrainingConfig(**counts)
        if config.sequences < config.batch_size * config.accumulation:
            return True
        epochs, steps = tc.min_epochs(config), tc.steps_per_epoch(config)
        return (epochs - 1) * steps < config.max_steps <= epochs * steps

    assert prove(least, dict.fromkeys(NAMES, (1, None))).proved


@pytest.mark.parametrize("name", PLANTED)
def test_planted_wrong_acceptance_is_caught(name):
    planted = PLANTED[name]
    promise = partial(PROMISES[planted.caught_by], planted.subject)
    found = prove(promise, ALL_INTEGERS)
    assert found.counterexample is not None, found.unknown
    assert not promise(**found.counterexample)
    # The same integers do not speak against the real rules.
    assert PROMISES[planted.caught_by](accepts_counts, **found.counterexample)


def test_every_promise_catches_something():
    assert {planted.caught_by for planted in PLANTED.values()} == set(PROMISES)


def test_the_run_that_ended_early():
    assert tc.steps_per_epoch(ENDED_EARLY) == tc.actual_steps(ENDED_EARLY) == 43
    assert tc.min_epochs(ENDED_EARLY) == 117
    assert tc.peak_step(ENDED_EARLY) is None
    findings = {f.rule: f for f in check_training(ENDED_EARLY)}
    assert list(findings) == [
        "reachable",
        "warmup-completes",
        "warmup-short",
        "peak-reached",
        "tokens",
    ]
    assert findings["reachable"].remedy == "set epochs to at least 117, or max_steps to at most 43"
    assert findings["warmup-completes"].received == "warmup_steps = 2000 of 43 steps"
    # More epochs alone would not have saved it: 10 tokens a parameter need more steps.
    longer = replace(ENDED_EARLY, epochs=117, warmup_steps=500)
    (finding,) = check_training(longer)
    assert finding.rule == "tokens"
    assert finding.remedy == "train for at least 7058 steps, or set parameters to at most 262144000"
    assert accepts(
        replace(longer, max_steps=7058, epochs=tc.min_epochs(replace(longer, max_steps=7058)))
    )
    assert accepts(MENDED)
    assert tc.peak_step(MENDED) == 500


def test_findings_name_what_is_wrong():
    (finding,) = check_training(replace(MENDED, batch_size=0, warmup_steps=-1))
    assert finding.rule == "positive"
    assert finding.received == "batch_size = 0, warmup_steps = -1"
    assert finding.remedy == "set batch_size to at least 1; set warmup_steps to at least 0"
    findings = {f.rule: f for f in check_training(replace(MENDED, sequences=511))}
    assert "4 × 128 = 512 sequences" in findings["steps-per-epoch"].expected
    assert findings["steps-per-epoch"].remedy.endswith("or sequences to at least 512")
    assert findings["reachable"].remedy.endswith("no number of epochs suffices")
    assert findings["tokens"].remedy == "train for at least 5000 steps"


@given(configs())
def test_remedies_mend(config):
    """Each number of a remedy is enough, and one less is not."""
    steps = tc.actual_steps(config)
    rules = {f.rule for f in check_training(config)}
    if "reachable" in rules and steps:
        assert tc.RULES["reachable"](replace(config, max_steps=tc.achievable_steps(config)))
        assert not tc.RULES["reachable"](replace(config, max_steps=tc.achievable_steps(config) + 1))
    if "warmup-short" in rules and steps:
        assert tc.RULES["warmup-short"](replace(config, warmup_steps=steps // 10))
        assert not tc.RULES["warmup-short"](replace(config, warmup_steps=steps // 10 + 1))
    if "tokens" in rules:
        most = tc.total_tokens(config) // 10
        assert tc.RULES["tokens"](replace(config, parameters=most))
        assert not tc.RULES["tokens"](replace(config, parameters=most + 1))
