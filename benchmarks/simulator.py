"""The simulator's own cost: many ranks × all-reduces, and a tensor-parallel MLP; wall, processor time and memory."""

import resource
import time
import warnings

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from isobit.foundation.machine import thread_count
from isobit.simulator import World

LIMITS = {"all-reduce": (256, 6.0), "tensor parallel": (64, 10.0)}


class MLP(nn.Module):
    def __init__(self, width=64, hidden=256):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def all_reduces(rank, count=100):
    x = torch.ones(1024)
    for _ in range(count):
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x.sum().item()


def tensor_parallel(rank, steps=3):
    torch.manual_seed(0)
    model = parallelize_module(
        MLP(),
        init_device_mesh("cpu", (dist.get_world_size(),)),
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(8, 64)
    for _ in range(steps):
        loss = ((model(x) - x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


CASES = {
    "all-reduce": ("100 × 1024 floats", all_reduces),
    "tensor parallel": ("MLP, 3 steps", tensor_parallel),
}


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=118)
    table = Table(
        "case", "what", "ranks", "wall s", "processor s", "events", "peak MB", "digest of the trace"
    )
    late = []
    with thread_count(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (what, body) in CASES.items():
            most, limit = LIMITS[name]
            World(2).run(body)  # imports and caches of torch, once
            for ranks in (8, most) if quick else (2, 8, 32, 64, 128, 256):
                if ranks > most:
                    continue
                begun, worked = time.perf_counter(), time.process_time()
                result = World(ranks).run(body)
                wall, work = time.perf_counter() - begun, time.process_time() - worked
                assert len(set(result.values)) == 1, "ranks disagree"
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
                cells = f"{wall:.2f}", f"{work:.2f}", str(len(result.trace.events)), f"{peak:.0f}"
                table.add_row(name, what, str(ranks), *cells, result.digest[:8])
                if ranks == most and wall > limit:
                    late.append(f"{name}: {wall:.1f} s for {ranks} ranks, over {limit:g} s")
    console.print(table)
    for line in late:
        console.print(line)
    return int(bool(late))
