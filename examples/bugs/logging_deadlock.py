"""Train under torchrun and hang: only the first rank reduces the loss that it prints."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(ranks * step + rank))
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step == 2:
        total = loss.detach().clone()
        dist.all_reduce(total)  # the other ranks never call it
        print(f"step {step}: loss {total.item() / ranks:.4f}")

dist.destroy_process_group()
