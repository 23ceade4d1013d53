"""Theorem: nothing that must not matter changes a bit of the linear operator.

1. Every relation is kept on every problem, with at least one comparison (isobit).
2. The same relations are broken by stock F.linear, so the inputs can show a change of order (control).
3. Every planted wrong kernel is caught by the relation named for it, so each relation can fail (sabotage).
"""

from functools import lru_cache

import pytest
import torch

from isobit.contracts import linear_sweep
from isobit.contracts.relations import RELATIONS, Problem, Tally, judge
from isobit.contracts.sabotage import SABOTAGE
from isobit.contracts.subject import OURS, STOCK

PROBLEMS = {p.subject_name: p for p in linear_sweep.problems(linear_sweep.QUICK_LAYERS, False)}


@lru_cache
def judge_ours(relation, problem):
    return judge(relation, OURS, PROBLEMS[problem])


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_isobit_keeps(problem, relation):
    verdict = judge_ours(relation, problem)
    assert verdict.kept, verdict.first
    assert verdict.compared >= 10_000


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_million_elements_are_compared_for_each_shape(problem):
    verdicts = [judge_ours(r, problem) for r in ("rows", "layouts")]
    assert sum(v.compared for v in verdicts) >= 1_000_000


@pytest.mark.parametrize("relation", ["rows", "layouts", "samples", "cuts"])
@pytest.mark.parametrize("dtype", linear_sweep.DTYPES)
def test_stock_breaks(dtype, relation):
    verdict = judge(relation, STOCK, Problem("control", 1024, 1024, dtype))
    assert verdict.differing > 0
    assert verdict.first


def test_every_sabotage_is_caught_by_the_relation_named_for_it():
    verdicts = dict(linear_sweep.judge_sabotage())
    assert len(verdicts) == 2 * len(SABOTAGE)
    assert len(SABOTAGE) >= 8
    assert [name for name, v in verdicts.items() if v.kept or not v.compared] == []


def test_every_relation_has_a_sabotage():
    assert {s.caught_by for s in SABOTAGE.values()} == set(RELATIONS)


def test_a_verdict_on_nothing_is_not_kept():
    assert not Tally().verdict(PROBLEMS[next(iter(PROBLEMS))], "rows").kept
    problem = Problem("none", 8, 8, torch.float32, row_counts=())
    assert not judge("rows", OURS, problem).kept


def test_an_error_of_nan_is_over_any_limit():
    tally = Tally()
    tally.within(float("nan"), 1.0, 1, "nan")
    assert tally.differing == 1


@pytest.mark.full
def test_full_sweep():
    for verdict in linear_sweep.sweep(OURS, linear_sweep.problems(linear_sweep.LAYERS, True)):
        assert verdict.kept, f"{verdict.subject}, {verdict.check}: {verdict.first}"
