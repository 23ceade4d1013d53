"""Sums that are rounded before they return have the bits of sums that are rounded by everyone.

The planted wrong rounds the addends instead, which would halve the bytes of both ways.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.levels import values
from isobit import bits
from isobit.errors import AgreementError
from isobit.order.tree import merge
from isobit.parallel import Levels
from isobit.parallel.collectives import elementwise_add
from isobit.parallel.collectives.elementwise_add import round_total
from isobit.parallel.collectives.tree_collectives import BucketedAllReduce, all_reduce_rounded
from isobit.simulator import World
from tests.parallel.test_collectives import leaves

SIZES, RANKS = (0, 1, 7, 64, 1001), 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_and_the_planted_wrong(dtype):
    def add(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "rank"))
        found = []
        for group in (None, Levels(mesh)):
            for size in SIZES:
                rounded = torch.empty(size, dtype=dtype)
                all_reduce_rounded(values(rank, size), rounded, group).wait()
                found.append(rounded)
        return found

    wanted = [[values(rank, size) for rank in range(RANKS)] for size in SIZES] * 2
    for found in World(RANKS).run(add).values:
        for got, addends in zip(found, wanted, strict=True):
            assert bits.equal(got, round_total(merge(addends, torch.add), dtype))
    addends = wanted[-1]
    early = merge([a.to(dtype).float() for a in addends], torch.add)  # the planted wrong
    assert not bits.equal(round_total(early, dtype), round_total(merge(addends, torch.add), dtype))


def test_buckets_notice_another_step_after_rounding():
    def run(rank):
        exchange = BucketedAllReduce((5, 300), bucket_bytes=64, rounded=torch.bfloat16)
        if rank == 3:
            exchange.clear()  # this rank has abandoned a step that others begin now
        for index, size in enumerate((5, 300)):
            exchange.ready(index, torch.ones(size))
        with pytest.raises(AgreementError, match="the same step on all ranks"):
            exchange.finish()
        exchange = BucketedAllReduce((5, 300), bucket_bytes=64, rounded=torch.bfloat16)
        for index, size in enumerate((5, 300)):
            exchange.ready(index, torch.full((size,), float(rank)))
        return exchange.finish()

    for sums in World(RANKS).run(run).values:
        assert [s.unique().tolist() for s in sums] == [[6.0], [6.0]]
        assert {s.dtype for s in sums} == {torch.bfloat16}


def test_kernels_are_used_where_they_agree_only(monkeypatch):
    if not elementwise_add.kernels_agree():
        pytest.skip("no kernels here")
    left, right = leaves(2, 40_000)
    left[:3] = torch.tensor([float("inf"), float("nan"), 1e-45])
    right[:3] = torch.tensor([-float("inf"), 1.0, -0.0])
    found, wanted = torch.empty_like(left), torch.empty_like(left)
    elementwise_add.add_two(left, right, found)
    elementwise_add.add_by_torch(left, right, wanted)
    assert bits.equal(found, wanted)
    # A kernel that leaves other NaNs, as torch's addition does, is not used.
    odd = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    hard = elementwise_add.hard_values
    monkeypatch.setattr(elementwise_add, "settle_nans", lambda t: t)
    monkeypatch.setattr(elementwise_add, "hard_values", lambda d: torch.cat([odd, hard(d)]).to(d))
    elementwise_add.kernels_agree.cache_clear()
    try:
        assert not elementwise_add.kernels_agree()
    finally:
        elementwise_add.kernels_agree.cache_clear()
