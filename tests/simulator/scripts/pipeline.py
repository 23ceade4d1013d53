"""Train a model in as many stages as ranks, with a 1F1B schedule of torch.distributed.pipelining."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if torch.cuda.is_available():
    device = torch.device(f"cuda:{rank % torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
torch.manual_seed(rank)
layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
stage = PipelineStage(layer, rank, world_size, device, input_args=torch.zeros(2, 8, device=device))
micro_batches = max(4, world_size)  # 1F1B takes at least as many as stages
schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=nn.MSELoss())
optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(0)
for step in range(3):
    x = torch.randn(2 * micro_batches, 8, generator=generator).to(device)
    losses = []
    if rank == 0:
        schedule.step(x)
    if rank == world_size - 1 and rank:
        schedule.step(target=torch.ones_like(x), losses=losses)
    elif rank:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
    dist.broadcast(mean, src=world_size - 1)
    if rank == 0:
        print(f"step {step}: loss {mean.item():.5f}")
dist.destroy_process_group()
