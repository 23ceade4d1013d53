"""Sums of terms that cannot be negative come back exactly, or are refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit import RevealError
from isobit.order.addition import digest
from isobit.reveal.targets.tensor_target import TensorTarget
from isobit.reveal.tree import reveal
from tests.reveal.kernels import ORDERS, add_by, exact, random_branch
from tests.sweeps import mostly_full


def positive_target(branch, n, places=8):
    terms = torch.zeros(n, places).t()
    columns = list(terms.t())
    run = lambda: add_by(branch, [c * c for c in columns]).sqrt()  # noqa: E731
    return TensorTarget("squares", terms, run, "positive", encode=math.sqrt)


@pytest.mark.parametrize("name", mostly_full(ORDERS, ["random", "16 stripes, pairs", "left fold"]))
def test_positive_sums_come_back(name):
    branch = ORDERS[name](120)
    assert reveal(positive_target(branch, 120)).order_digest == digest(branch)


@settings(max_examples=15)
@given(n=st.integers(1, 60), seed=st.integers(0, 10**6))
def test_any_positive_tree_comes_back(n, seed):
    branch = random_branch(n, seed)
    assert reveal(positive_target(branch, n)).order_digest == digest(branch)


def test_a_fused_positive_sum_is_refused():
    terms = torch.zeros(20, 4).t()
    with pytest.raises(RevealError, match="tree of additions"):
        reveal(TensorTarget("fused", terms, lambda: exact(list(terms.t())), "positive"))


def test_a_hidden_sum_is_refused():
    terms = torch.zeros(20, 4).t()
    with pytest.raises(RevealError, match="hides its order"):
        reveal(TensorTarget("hidden", terms, lambda: terms.sum(1).clamp(max=1.0), "positive"))


def test_a_wide_corner_of_a_positive_sum_is_refused():
    terms = torch.zeros(64, 8).t()

    def run():
        squares = [c * c for c in terms.t()]
        total = add_by(((0, 3), (1, 2)), [v.double() for v in squares[:4]]).float()
        for value in squares[4:]:
            total = total + value
        return total.sqrt()

    with pytest.raises(RevealError):
        reveal(TensorTarget("corner", terms, run, "positive", encode=math.sqrt))
