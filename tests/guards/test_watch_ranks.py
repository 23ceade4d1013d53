"""A watch over several ranks, simulated: who differs is named by majority, and shards skip together.

1. Replicas that differ, with rank 0 at fault; the right twin is silent.
2. Norms that differ inside a tensor-parallel group.
3. FSDP2: a NaN in one rank's shard, and all ranks skip the step.
"""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from isobit import ArgumentError, bits
from isobit.guards import rank_agreement, replicated_tensors
from isobit.simulator import World
from tests.guards.test_watch import quiet
from tests.guards.watched_programs import batch, net


def replicas(wrong):
    def program(rank):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with quiet(model, optimizer, agree_every=2) as guard:
            for step in range(2):
                optimizer.zero_grad()
                F.mse_loss(model(batch(7 * step + rank)[0]), batch(step)[1]).backward()
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                if wrong and rank == 0:  # rank 0 is the one at fault, and must be the one named
                    model[2].bias.grad.mul_(2)
                optimizer.step()
        return [str(event) for event in guard.findings]

    return World(4).run(program).values


def test_replicas_that_differ_are_named_by_majority():
    assert all(found == [] for found in replicas(False))
    for rank, found in enumerate(replicas(True)):
        assert len(found) == 1
        assert found[0].startswith(f"step 1, rank {rank}: replicas-differ: 2.bias: rank 0, 2.bias")
        assert found[0].endswith("as ranks 1–3")


def tensor_parallel(wrong):
    """DeepSpeed#1801: a clipping that only rank 0 applies to what all ranks replicate."""

    def program(rank):
        torch.manual_seed(0)
        norm = nn.LayerNorm(8)
        torch.manual_seed(10 + rank)
        model = nn.ModuleDict({"norm": norm, "shard": nn.Linear(8, 4, bias=False)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = dist.group.WORLD
        options = {"agree_every": 1, "tensor_group": group, "sharded": ["shard.*"]}
        with quiet(model, optimizer, **options) as guard:
            for step in range(2):
                optimizer.zero_grad()
                model["shard"](norm(batch(step)[0])).square().sum().backward()
                for p in norm.parameters():
                    dist.all_reduce(p.grad)
                    if rank == 0 or not wrong:
                        p.grad.mul_(0.01)
                optimizer.step()
        return [str(event) for event in guard.findings]

    return World(4).run(program).values


def test_norms_that_differ_inside_a_tensor_parallel_group():
    assert all(found == [] for found in tensor_parallel(False))
    for found in tensor_parallel(True):
        assert len(found) >= 2
        assert all("rank 0, norm." in each and "as ranks 1–3" in each for each in found)


def test_replicated_tensors():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    assert len(replicated_tensors(model)) == 4
    assert rank_agreement(replicated_tensors(model, sharded=["1.*"])).parameters == 2
    with pytest.raises(ArgumentError, match="does not shard"):
        replicated_tensors(model, sharded=["*"])


def sharded(wrong):
    """FSDP2: one rank has a NaN in its shard, and all skip the step."""

    def program(rank):
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = []
        with quiet(model, optimizer, policy="skip", group=dist.group.WORLD) as guard:
            for step in range(3):
                optimizer.zero_grad()
                F.mse_loss(model(batch(2 * step + rank)[0]), batch(step)[1]).backward()
                if wrong and (rank, step) == (1, 1):
                    next(model.parameters()).grad.to_local()[0] = float("nan")
                before.append(next(model.parameters()).detach().to_local().clone())
                optimizer.step()
        same = [bits.equal(a, b) for a, b in pairwise(before)]
        return same, guard.skipped_steps, [event.name for event in guard.findings]

    return World(2).run(program).values


def test_ranks_with_shards_skip_together():
    assert all(found == ([False, False], 0, []) for found in sharded(False))
    first, second = sharded(True)
    assert first == ([False, True], 1, [])
    assert second == ([False, True], 1, ["nonfinite-gradient"])


def test_shards_need_a_group_to_skip():
    def program(rank):
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ArgumentError, match="skip a step together"):
            quiet(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="skip")
        return "refused"

    assert all(value == "refused" for value in World(2).run(program).values)
