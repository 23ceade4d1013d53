"""Programs for simulated ranks, each with a watch that compares replicas where there are any."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.guards.bugs.bug import quiet
from tests.guards.right.networks import mlp
from tests.guards.right.program import on_ranks, rand


def same_model(*widths):
    torch.manual_seed(0)
    return mlp(*widths)


def watched(model, called, rank, *, optimizer=None, micro=1, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    with quiet(called, optimizer, patience=3, **options) as guard:
        for step in range(4):
            optimizer.zero_grad()
            for at in range(micro):
                called(rand(1000 * step + 10 * at + rank, 4, 8)).square().mean().backward()
            optimizer.step()
    assert guard.steps == 4
    return guard.findings


@on_ranks
def wrapped_by_ddp(rank):
    model = same_model(8, 16, 4)
    return watched(model, DistributedDataParallel(model), rank, agree_every=1)


@on_ranks
def ddp_with_accumulation_and_no_sync(rank):
    model = same_model(8, 16, 4)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with quiet(wrapped, optimizer, patience=3, agree_every=1) as guard:
        for step in range(4):
            optimizer.zero_grad()
            with wrapped.no_sync():
                wrapped(rand(100 * step + rank, 4, 8)).square().mean().backward()
            wrapped(rand(100 * step + rank + 50, 4, 8)).square().mean().backward()
            optimizer.step()
    return guard.findings


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return (self.first if self.count % 2 else self.second)(x)


@on_ranks
def ddp_with_unused_parameters(rank):
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    return watched(wrapped, wrapped, rank, agree_every=1)


@on_ranks
def ddp_with_frozen_parameters(rank):
    model = same_model(8, 16, 4)
    model[0].requires_grad_(False)
    return watched(model, DistributedDataParallel(model), rank, agree_every=1)


@on_ranks
def gradients_averaged_by_hand(rank):
    model = same_model(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with quiet(model, optimizer, patience=3, agree_every=1) as guard:
        for step in range(4):
            optimizer.zero_grad()
            model(rand(100 * step + rank, 4, 8)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            optimizer.step()
    return guard.findings


@on_ranks
def sharded_optimizer_state(rank):
    model = same_model(8, 16, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    wrapped = DistributedDataParallel(model)
    return watched(model, wrapped, rank, optimizer=optimizer, agree_every=1)


@on_ranks
def fully_sharded(rank):
    model = fully_shard(
        same_model(8, 16, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),))
    )
    return watched(model, model, rank)


@on_ranks
def fully_sharded_in_bf16_with_accumulation(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    model = same_model(8, 16, 4)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model = fully_shard(model, mesh=mesh, mp_policy=policy)
    return watched(model, model, rank, micro=2)


def cut(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@on_ranks
def tensor_parallel(rank):
    model = cut(same_model(8, 16, 4), init_device_mesh("cpu", (dist.get_world_size(),)))
    return watched(model, model, 0)


@on_ranks
def tensor_parallel_and_fully_sharded(rank):
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor")
    )
    model = fully_shard(cut(same_model(8, 16, 4), mesh["tensor"]), mesh=mesh["data"])
    return watched(model, model, mesh["data"].get_local_rank())
