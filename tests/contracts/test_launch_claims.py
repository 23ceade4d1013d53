"""Theorem: `launches` goes red for sizes in other places, for a second load, for no launch; so DIM-002 can fail."""

from dataclasses import replace

import pytest
import torch

import isobit
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store.tree import library
from isobit.foundation import launches, native
from isobit.library.linear import planted

HERE = "tests.contracts.test_launch_claims"


def right(x, weight, bias):
    return isobit.linear(x, weight, bias)


def exchanges_sizes(x, weight, bias):
    return planted.sizes_exchanged(x, weight, bias)


def loads_each_time(x, weight, bias):
    native.load.__wrapped__()
    return isobit.linear(x, weight, bias)


def loads_for_few_rows(x, weight, bias):
    if len(x) == 1:
        native.load.cache_clear()
        native.load()
    return isobit.linear(x, weight, bias)


def launches_nothing(x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


def loads_for_more_rows(x, weight, bias):
    if len(x) > 30:
        native.load.cache_clear()
        native.load()
    return isobit.linear(x, weight, bias)


def in_one_chain(x, weight, bias):
    """The order of another shape: K products in one chain, where the plan of K has segments."""
    y = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        y = torch.addcmul(y, x[:, k : k + 1], weight[:, k])
    return y + bias


def judge(subject, claim="DIM-002"):
    contract = load_contract(library() / "dimension_independent.contract.yaml")
    claims = tuple(c for c in contract.claims if c.id == claim)
    alone = replace(contract, claims=claims, subject=f"{HERE}:{subject}", operator="", output=())
    (record,) = verify_contract(alone, Options(trusted=("tests",)))
    return record


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("exchanges_sizes", "launched with [{'rows': "),
        ("loads_each_time", "the call loaded the binary 1 times, expected 0"),
        ("loads_for_few_rows", "the call loaded the binary 1 times, expected 0"),
        ("launches_nothing", "no launch was recorded"),
    ],
)
def test_wrong_launches_are_broken(subject, said):
    record = judge(subject)
    assert record.verdict == "broken"
    assert said in record.detail


def test_right_launches_are_kept_and_each_plant_is_caught():
    record = judge("right")
    assert record.verdict == "kept"
    caught = {planted.name for planted in record.planted if planted.caught}
    assert {"never launched", "made for one size", "loaded at each call"} < caught
    assert "isobit.library.linear.planted:sizes_exchanged" in caught


@pytest.mark.full
def test_a_kernel_made_for_the_shape_has_the_bits_of_the_operator():
    assert judge("right", "made-for-the-shape").verdict == "kept"
    broken = judge("in_one_chain", "made-for-the-shape")
    assert (broken.verdict, "program made for K" in broken.detail) == ("broken", True)


def test_launches_are_counted_on_both_executors_of_the_cpu():
    with launches.record_launches() as seen:
        assert judge("right", "binaries").verdict == "kept"
    assert {launch.executor for launch in seen} == {"native", "portable"}
    broken = judge("loads_for_more_rows", "binaries")
    assert (broken.verdict, "1 more binaries for 31 rows" in broken.detail) == ("broken", True)
    assert "[] for 18 rows" in judge("launches_nothing", "binaries").detail


def test_sizes_have_names():
    with launches.record_launches() as seen:
        isobit.linear(torch.randn(2, 3, 5), torch.randn(7, 5))
        isobit.softmax(torch.randn(2, 3, 5))
    assert [launch.named() for launch in seen] == [{"rows": 6, "k": 5, "n": 7}, {"rows": 6, "n": 5}]
