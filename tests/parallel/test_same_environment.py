"""Ranks that differ in version, arithmetic, parameters or batch raise before they train together.

Tested on simulated ranks, and on two gloo processes, one of them without AMX.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import isobit
from isobit.errors import AgreementError
from isobit.foundation import native
from isobit.foundation.majority import count_votes, name_ranks
from isobit.ops import dispatch
from isobit.parallel import ColumnParallelLinear, GlobalBatch, Gradients, same_environment
from isobit.simulator import World

BF16 = torch.bfloat16
ROOT = Path(__file__).parents[2]


def refusals(ranks, function):
    def run(rank):
        with pytest.raises(AgreementError) as refusal:
            function(rank)
        return str(refusal.value)

    found = World(ranks).run(run).values
    assert len(set(found)) == 1
    return found[0]


@pytest.fixture
def other_engine(monkeypatch):
    """Rank 2 is on a host without AMX."""
    monkeypatch.setattr(
        dispatch,
        "engine_of",
        lambda dtype: "chain" if dtype != BF16 or dist.get_rank() == 2 else "amx",
    )


@pytest.mark.parametrize("wrap", [lambda net: net, DistributedDataParallel, fully_shard])
def test_another_engine_is_named(other_engine, wrap):
    said = refusals(
        4,
        lambda _: Gradients(
            wrap(isobit.nn.Linear(8, 8).to(BF16)), GlobalBatch(4, 4, order="micro")
        ),
    )
    assert "engine of bfloat16" in said
    assert "chain on rank 2 (not that of most ranks, amx on ranks 0, 1, 3)" in said
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in said


def test_an_engine_that_no_parameter_uses_does_not_matter(other_engine):
    World(4).run(lambda _: Gradients(isobit.nn.Linear(8, 8), GlobalBatch(4, 4)))


def test_the_dtype_that_fully_shard_gathers_counts(other_engine):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    batch = GlobalBatch(4, 4, order="micro")
    said = refusals(
        4, lambda _: Gradients(fully_shard(isobit.nn.Linear(8, 8), mp_policy=policy), batch)
    )
    assert "engine of bfloat16" in said


def test_tensor_parallel_ranks_compare_engines_once(other_engine, monkeypatch):
    def split(_, dtype=BF16, layers=1):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        for _ in range(layers):
            ColumnParallelLinear(1024, 1024, mesh=mesh, dtype=dtype)

    assert "chain on rank 2" in refusals(4, split)
    calls = []
    kept = same_environment.require_same
    monkeypatch.setattr(
        same_environment, "require_same", lambda *given: (calls.append(1), kept(*given))
    )
    World(4).run(split, torch.float32, 3)
    assert len(calls) == 4


def test_other_dtypes_shapes_and_batches_are_named():
    def make(rank, dtype=torch.float32, features=8, frozen=False, of=4):
        layer = isobit.nn.Linear(8, features).to(dtype)
        layer.bias.requires_grad_(not frozen)
        return Gradients(layer, GlobalBatch(of, 2))

    said = refusals(2, lambda rank: make(rank, torch.bfloat16 if rank else torch.float32))
    assert "engine" in said or "parameters" in said
    assert "no majority" in said
    assert "parameters" in refusals(2, lambda rank: make(rank, features=8 + rank))
    assert "parameters" in refusals(2, lambda rank: make(rank, frozen=bool(rank)))
    assert "GlobalBatch(total=8" in refusals(2, lambda rank: make(rank, of=8 if rank else 4))


def test_other_versions_are_named(monkeypatch):
    class Version:
        def __init__(self, most, odd):
            self.most, self.odd = most, odd

        def __str__(self):
            return self.odd if dist.get_rank() == 1 else self.most

    monkeypatch.setattr(same_environment, "VERSION", Version("1", "2"))
    said = refusals(
        3,
        lambda _: same_environment.require_same(
            same_environment.facts_of(set()), same_environment.RankGroup.of(None)
        ),
    )
    assert "version of the order" in said
    assert "2 on rank 1 (not that of most ranks, 1 on ranks 0, 2)" in said


# ---- votes -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_votes(values):
    vote = count_votes(values)
    assert sorted(member for group in vote.groups for member in group) == list(range(len(values)))
    assert all(len({values[member] for member in group}) == 1 for group in vote.groups)
    assert len({values[group[0]] for group in vote.groups}) == len(vote.groups)
    counts = sorted((values.count(value) for value in set(values)), reverse=True)
    assert [len(group) for group in vote.groups] == counts
    assert vote.is_tied == (len(counts) > 1 and counts[0] == counts[1])
    assert vote.is_unanimous == (len(counts) == 1)
    assert values[vote.reference] in {v for v in values if values.count(v) == counts[0]}


def test_names_of_ranks():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([4, 0, 2, 5, 6, 7, 9]) == "ranks 0, 2, 4–7, 9"


# ---- two processes ---------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, torch.distributed as dist, isobit
from isobit.errors import AgreementError
from isobit.parallel import GlobalBatch, Gradients
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
try:
    Gradients(isobit.nn.Linear(64, 64).to(torch.bfloat16), GlobalBatch(4, 2))
except AgreementError as refusal:
    print(refusal)
"""


@pytest.mark.full
@pytest.mark.skipif(
    native.load() is not None or not native.pairs_bf16(), reason="AMX is what one rank shall lack"
)
def test_a_process_without_amx_is_named():
    with tempfile.TemporaryDirectory() as folder:
        limits = ({}, {"ONEDNN_MAX_CPU_ISA": "AVX2"})
        words = [sys.executable, "-W", "ignore", "-c", PROGRAM]
        ranks = [
            subprocess.Popen(
                [*words, str(rank), folder],
                env=os.environ | limit,
                stdout=subprocess.PIPE,
                cwd=ROOT,
            )
            for rank, limit in enumerate(limits)
        ]
        said = [process.communicate(timeout=120)[0].decode() for process in ranks]
    for text in said:
        assert "amx on rank 0; chain on rank 1 (no majority)" in text
