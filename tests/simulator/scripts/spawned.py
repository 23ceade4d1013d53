"""Start a process per GPU with torch.multiprocessing.spawn, save on rank 0 and load on all."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def worker(rank: int, world_size: int, folder: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = nn.Linear(4, 4).to(rank)
    path = os.path.join(folder, "model.pt")
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    state = torch.load(path, map_location={"cuda:0": f"cuda:{rank}"}, weights_only=True)
    model.load_state_dict(state)
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.ones(2, 4, device=f"cuda:{rank}") * (rank + 1)
    before = model.weight.detach().cpu()
    ddp(x).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight.cpu())  # .cpu() made a copy
    gathered = [torch.empty_like(model.weight) for _ in range(world_size)]
    dist.all_gather(gathered, model.weight.detach())
    assert all(torch.equal(gathered[0], other) for other in gathered)
    if rank == 0:
        print("replicas agree on", torch.cuda.device_count(), "devices")
    dist.destroy_process_group()


if __name__ == "__main__":
    count = torch.cuda.device_count()
    mp.spawn(worker, args=(count, sys.argv[1]), nprocs=count, join=True)
