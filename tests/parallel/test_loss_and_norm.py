"""Loss and gradient norm do not depend on how micro-batches and ranks divide them.

1. On four gloo ranks the norm has the bits of one process for any sharding; torch's norm does not.
2. The loss is the exact sum over the exact count, rounded once; a mean of means is another number.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit import ArgumentError, UnsupportedError, bits, exact_sum
from isobit.order.exact_sum import round_fp32
from isobit.parallel.collectives.levels import RankGroup
from isobit.parallel.data.grad_norm import clip_grad_norm_, get_total_norm
from isobit.parallel.data.loss_meter import MOST_RANKS, LossMeter, add_states, divide
from isobit.parallel.tensor.shard import counted_here, find_shards, local_shard_of
from tests.guards.gloo_ranks import found_by_ranks
from tests.guards.gloo_scalars import TRIES, Part, drawn, with_grad


def test_norms_have_one_process_bits():
    for found in found_by_ranks():
        assert found["norms"]["differ"] == found["norms"]["clipped"] == 0


def test_fsdp():
    found = [ranks["fully_sharded"] for ranks in found_by_ranks()]
    assert all(f["norm"] and f["clipped"] and "have the same shards" in f["agreed"] for f in found)
    assert found[-1]["empty"]  # three rows on four ranks


def test_the_control_depends_on_the_shards():
    assert 0 < found_by_ranks()[0]["norms"]["stock"] <= TRIES


def test_groups():
    for rank, ranks in enumerate(found_by_ranks()):
        found = ranks["norms_of_groups"]
        assert found["shards"]
        assert found["still in step"]
        assert "all 2 shards" in found["replicas"]
        assert "the 2 ranks that have the shards" in found["parts"]
        assert found["one refuses"].startswith("UnsupportedError" if rank else "ArgumentError")


def test_each_rank_counts_its_shards_and_the_first_what_all_hold():
    made = torch.nn.Linear(3, 2)
    made.__dict__["_isobit_shards"] = {"weight": Part(1, 2)}
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    shards = find_shards(made)
    for index, wanted in enumerate([[6, 2], [6]]):
        members = RankGroup((0, 1), index, (None,), torch.device("cpu"))
        assert [g.numel() for g in counted_here(made.parameters(), members, shards)] == wanted
    assert local_shard_of(made.weight, shards).where == str(Part(1, 2))
    assert local_shard_of(made.bias, shards).where == ""


def test_losses():
    terms = drawn(7, 96).abs()
    exact = sum(map(Fraction, terms.tolist())) / 96
    for rank, ranks in enumerate(found_by_ranks()):
        found = ranks["losses"]
        assert found["value"] == found["mean"] == float(exact).hex()
        assert found["of means"] != found["value"]  # the planted wrong
        assert found["fp32"] == torch.tensor(float(exact)).item().hex()
        assert found["cross entropy"]
        assert "an active token" in found["nothing"]
        assert found["outside"] is True if rank < 2 else "outside it" in found["outside"]


@given(st.integers(-(10**60), 10**60), st.integers(1, 10**9))
def test_quotients_are_rounded_once(whole, count):
    exact = Fraction(whole, count << 320)
    assert divide(whole, count, torch.float64) == float(exact)
    large = exact * 2**240  # within fp32
    found = divide(whole << 240, count, torch.float32)
    assert all(
        abs(Fraction(found) - large) <= abs(Fraction(other) - large) for other in neighbours(found)
    )


def neighbours(value):
    at = torch.tensor(value)
    return [torch.nextafter(at, torch.tensor(end)).item() for end in (math.inf, -math.inf)]


def test_a_tie_of_fp32_that_fp64_would_make():
    # 1 + 2^-24 + 2^-80: fp64 drops the last, and then ties to even.
    whole = (1 << 320) + (1 << 296) + (1 << 240)
    assert divide(whole, 1, torch.float32) == 1 + 2**-23
    assert round_fp32(divide(whole, 1, torch.float64)) == 1.0


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.randoms())
def test_micro_batches_in_any_cut_and_order(terms, random):
    x = torch.tensor(terms)
    whole, cut = LossMeter(), LossMeter()
    whole.add(x)
    pieces = list(x.split(random.randint(1, len(terms))))
    random.shuffle(pieces)
    for piece in pieces:
        cut.add(piece)
    assert bits.equal(cut.value(), whole.value())
    assert (
        bits.equal(cut.cross_entropy(), exact_sum(-x) / -len(terms)) or cut.cross_entropy().isnan()
    )


def test_meter_refuses():
    with pytest.raises(ArgumentError, match="active token"):
        LossMeter().value()
    meter = LossMeter()
    meter.add(torch.ones(2))
    with pytest.raises(ArgumentError, match="float64"):
        meter.value(dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="zero or more"):
        meter.add(torch.ones(2), -1)
    meter.reset()
    with pytest.raises(ArgumentError):
        meter.value()
    alone = RankGroup.of(None)
    with pytest.raises(UnsupportedError, match="fit an int64"):
        add_states([0], RankGroup(range(MOST_RANKS + 1), 0, (None,), alone.device))


def test_without_ranks_it_is_the_plain_norm():
    grad = drawn(3, 50)
    assert get_total_norm(with_grad(torch.tensor([3.0, 4.0]))) == 5.0
    made = with_grad(grad)
    clip_grad_norm_([made], 1.0)
    assert get_total_norm([made]) < 1.001
    with pytest.raises(UnsupportedError, match="finite"):
        clip_grad_norm_(with_grad(torch.tensor([torch.nan])), 1.0, error_if_nonfinite=True)
