"""Unmodified torch.distributed programs, each a function of the rank; under torchrun, prints what rank 0 got."""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 2


class MLP(nn.Module):
    def __init__(self, width=16, hidden=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.05)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def batch(index):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 + index))


def train(model, x, optimizer=torch.optim.SGD):
    """Losses of a few steps, and the size of what was learnt."""
    stepper, losses = optimizer(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        loss = ((model(x) - x) ** 2).mean()
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses


def weight_sums(model):
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [float(p.double().sum()) for p in whole]


def ddp(rank, folder):
    model = DistributedDataParallel(MLP())
    return train(model, batch(rank)) + weight_sums(model)


def fsdp1(rank, folder):
    model = FullyShardedDataParallel(MLP(), device_id=torch.device("cpu"))
    losses = train(model, batch(rank))
    with FullyShardedDataParallel.summon_full_params(model):
        return losses + weight_sums(model)


def fsdp2(rank, folder):
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), MLP()
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return train(model, batch(rank), torch.optim.AdamW) + weight_sums(model)


def tensor_parallel(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, batch(0), torch.optim.AdamW) + weight_sums(model)


def fsdp2_by_tensor_parallel(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(
        MLP(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["data"])
    return train(model, batch(rank // 2)) + weight_sums(model)


def saved_and_loaded(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kept = distribute_tensor(torch.arange(32.0), mesh, [Shard(0)])
    checkpoint.save({"kept": kept}, checkpoint_id=folder)
    state = {"kept": distribute_tensor(torch.zeros(32), mesh, [Shard(0)])}
    checkpoint.load(state, checkpoint_id=folder)
    return state["kept"].full_tensor().tolist()


def pipeline(rank, folder):
    ranks, x = dist.get_world_size(), batch(0)
    part = MLP()
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, n_microbatches=4, loss_fn=lambda out, target: ((out - target) ** 2).mean()
    )
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == ranks - 1 else {}))
    sizes = torch.tensor(
        [float(part.up.weight.grad.abs().sum()), float(part.down.weight.grad.abs().sum())]
    )
    every = [torch.empty(2) for _ in range(ranks)]
    dist.all_gather(every, sizes)
    return torch.cat(every).tolist()


def compiled(rank, folder):
    """Functional collectives inside a graph that torch.compile captures whole."""
    import torch.distributed._functional_collectives as functional

    def step(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(total + x, 0, dist.group.WORLD) * 0.5

    return torch.compile(step, backend="aot_eager", fullgraph=True)(batch(rank)[0]).tolist()


WORKLOADS = (
    ddp,
    fsdp1,
    fsdp2,
    tensor_parallel,
    fsdp2_by_tensor_parallel,
    saved_and_loaded,
    pipeline,
    compiled,
)


def run_all(rank, folder):
    warnings.simplefilter("ignore")
    return {work.__name__: work(rank, os.path.join(folder, work.__name__)) for work in WORKLOADS}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = run_all(dist.get_rank(), sys.argv[1])
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
