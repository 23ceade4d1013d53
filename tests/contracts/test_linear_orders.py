"""Theorem: the linear operator has the defined order in every configuration of its sweep, so its bits cannot differ.

1. Every certificate is one order, the defined one, and replays to the bit (isobit).
2. Stock F.linear's certificates are of several orders (control).
3. A planted kernel that takes its order from the row count is two classes, and is not the defined one (sabotage).
"""

from dataclasses import replace

import pytest
import torch

import isobit
from isobit import targets
from isobit.contracts import linear_orders, linear_sweep, transforms
from isobit.contracts.linear_orders import (
    OrderVerdict,
    certify_frozen,
    certify_problem,
    certify_tokens,
    expected_order,
)
from isobit.order.target import Terms

PROBLEMS = {p.subject_name: p for p in linear_sweep.problems(linear_sweep.QUICK_LAYERS, False)}
# A row, few rows, a tail of the tile engine, a second tile, a last row alone: each takes another path.
ROWS = (1, 5, 33, 130, 257)
EXTENTS = (333, 1024, 1032)
TOKENS = (2, 11, 44, 255, 256, 257, 300, 515, 1030)


def check(verdicts, configurations):
    count = 0
    for verdict in verdicts:
        assert verdict.kept, f"{verdict.subject}: {verdict.certificate}"
        count += verdict.certificate.count
    assert count == configurations


@pytest.mark.parametrize("problem", PROBLEMS)
def test_outputs_and_input_gradients(problem):
    check(certify_problem(replace(PROBLEMS[problem], row_counts=ROWS)), 2 * len(ROWS) * len(transforms.THREADS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameter_gradients(dtype):
    check(certify_tokens(dtype, TOKENS, transforms.THREADS), len(TOKENS) * 2 * 2 * len(transforms.THREADS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_of_frozen_layers(dtype):
    """One row has a path of its own where the segments come in fours."""
    check(certify_frozen(dtype, EXTENTS, ROWS), len(EXTENTS) * len(ROWS) * len(transforms.THREADS))


@pytest.mark.parametrize(("dtype", "m"), [(torch.float32, 1), (torch.float32, 5), (torch.bfloat16, 130)])
def test_the_frozen_target_runs_on_packed_weights(dtype, m):
    target = linear_orders.frozen(1024, m, dtype=dtype)
    probe = [Terms((0,), (1.0,))]
    assert target.sums(probe) == [1.0]
    layer = target.everywhere.__closure__[0].cell_contents
    packed = layer._packed.current(layer.weight)
    assert packed is not None
    packed.zero_()
    assert target.sums(probe) == [0.0]


@pytest.mark.full
@pytest.mark.parametrize("problem", PROBLEMS)
def test_outputs_and_input_gradients_at_every_row_count_of_the_sweep(problem):
    rows = transforms.SOME_ROW_COUNTS
    check(certify_problem(PROBLEMS[problem]), 2 * len(rows) * len(transforms.THREADS))


def test_stock_is_not_certified():
    found = isobit.certify(targets.linear, [{"k": 1024, "m": m} for m in ROWS])
    assert not OrderVerdict("stock", found, expected_order("linear", 1024, torch.float32)).kept


def test_an_order_from_the_row_count_is_caught(monkeypatch):
    def planted(x, weight):
        part = x.shape[1] // 4
        if len(x) < 32:
            return isobit.linear(x, weight)
        return isobit.linear(x[:, part:], weight[:, part:]) + isobit.linear(x[:, :part], weight[:, :part])

    def target(**shape):
        return targets.linear(**shape, function=planted)

    monkeypatch.setitem(linear_orders.TARGETS, "linear", target)
    problem = linear_sweep.Problem("planted", 768, 64, torch.float32, (1, 64), (1,))
    verdict = next(iter(certify_problem(problem)))
    assert not verdict.kept
    assert len(verdict.certificate.classes) == 2


def test_a_wrong_order_that_is_everywhere_the_same_is_caught():
    found = isobit.certify(lambda m: targets.linear(1024, m, 64, function=isobit.linear), [1, 2])
    assert found.kept
    assert not OrderVerdict("wrong", found, expected_order("linear", 2048, torch.float32)).kept
