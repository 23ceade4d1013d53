"""Every order that is known comes back exactly, and what is no tree of additions is refused."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import isobit
from isobit import RevealError
from isobit.order.addition import chain, digest
from isobit.reveal import targets
from isobit.reveal.certificate import plant_compensated, plant_tree
from isobit.reveal.tree import reveal
from tests.reveal.kernels import (
    ORDERS,
    add_by,
    blocks,
    pairs,
    permuted,
    random_branch,
    stripes,
    target_of,
)
from tests.sweeps import mostly_full


@pytest.mark.parametrize("name", mostly_full(ORDERS, ["random", "AMX's even and odd chains"]))
@pytest.mark.sweep(1)
def test_known_orders_come_back_at_4096(name):
    branch = ORDERS[name](4096)
    tree = reveal(target_of(branch, 4096, places=2048))
    assert tree.order_digest == digest(branch)
    assert tree.replayed >= 8
    assert str(tree.arithmetic) == "fp32 sums, subnormals kept, -0 kept"


@settings(max_examples=30)
@given(n=st.integers(1, 300), name=st.sampled_from(sorted(ORDERS)))
def test_known_orders_come_back_at_any_size(n, name):
    branch = ORDERS[name](n)
    tree = reveal(target_of(branch, n, places=64))
    assert tree.order_digest == digest(branch)
    assert (tree.replayed >= 8) == (n > 1)


@settings(max_examples=30)
@given(n=st.integers(2, 90), seed=st.integers(0, 10**6), places=st.sampled_from([1, 3, 64]))
def test_any_binary_tree_comes_back(n, seed, places):
    branch = random_branch(n, seed)
    assert reveal(target_of(branch, n, places)).order_digest == digest(branch)


@settings(max_examples=20)
@given(
    n=st.integers(20, 700),
    width=st.integers(2, 40),
    order=st.sampled_from([pairs, chain]),
    seed=st.integers(0, 10**6),
)
def test_families_come_back(n, width, order, seed):
    for branch in (stripes(n, width, order), blocks(n, width, order), permuted(n, seed)):
        assert reveal(target_of(branch, n, places=64), arithmetic=False).order_digest == digest(
            branch
        )


def test_few_probes():
    """A chain from either end, in any permutation, takes a small multiple of n."""
    for name in ("left fold", "right fold", "reversed", "permuted"):
        tree = reveal(target_of(ORDERS[name](1024), 1024), arithmetic=False)
        assert tree.probes < 6 * 1024, name


# ---- refusals -----------------------------------------------------------------------------------------------


def test_compensated_sums_are_not_plain_trees():
    with pytest.raises(RevealError, match="not a tree of additions"):
        reveal(plant_compensated(40))


@pytest.mark.parametrize(
    "function", [torch.amax, torch.prod, lambda x: x[0], lambda x: (x * x).sum()]
)
def test_what_is_no_sum_is_refused(function):
    with pytest.raises(RevealError):
        isobit.reveal.order(function, 20)


def test_what_is_not_repeatable_is_refused():
    def shuffled(x):
        return x[torch.randperm(len(x))].cumsum(0)[-1]

    with pytest.raises(RevealError):
        isobit.reveal.order(shuffled, 300)
    calls = iter(range(10**6))
    with pytest.raises(RevealError, match="not repeatable"):
        isobit.reveal.order(lambda x: x.sum() + (next(calls) % 2), 30)


def test_a_branch_on_the_data_fails_the_replay():
    def treacherous(x):
        probing = bool((x.abs() > 2.0**50).any())
        return add_by(chain(range(len(x))) if probing else pairs(range(len(x))), list(x))

    with pytest.raises(RevealError, match="not a tree of additions"):
        isobit.reveal.order(treacherous, 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_results_that_are_no_numbers_are_refused(bad):
    with pytest.raises(RevealError):
        isobit.reveal.order(lambda x: x.sum() * bad, 16)


def test_arguments_are_checked():
    with pytest.raises(isobit.ArgumentError, match="number of terms"):
        isobit.reveal.order(torch.sum)
    with pytest.raises(isobit.ArgumentError, match="leave n out"):
        isobit.reveal.order(targets.sum(16), 17)
    with pytest.raises(isobit.ArgumentError, match="callable"):
        isobit.reveal.order(3, 4)
    with pytest.raises(isobit.ArgumentError, match="fp32, bf16 or fp16"):
        isobit.reveal.order(torch.sum, 4, dtype=torch.float64)


# ---- speed --------------------------------------------------------------------------------------------------


def test_linear_at_4096_takes_under_five_seconds_of_a_core():
    start = time.process_time()
    tree = reveal(targets.linear(4096, 16))
    assert tree.replayed
    assert time.process_time() - start < 5


@pytest.mark.full
@pytest.mark.parametrize("target", [targets.sum, targets.log_softmax])
def test_a_vocabulary_sum_takes_five_calls_a_term(target):
    """A count, since the time is the machine's: the sum takes 4.5 calls a term, log_softmax 3.0."""
    tree = reveal(target(151_936, 2))
    assert tree.n == 151_936
    assert tree.probes < 5 * tree.n


def test_planted_trees_in_plain_python_come_back():
    for seed in range(5):
        branch = random_branch(33, seed)
        assert reveal(plant_tree(branch, 33)).order_digest == digest(branch)
