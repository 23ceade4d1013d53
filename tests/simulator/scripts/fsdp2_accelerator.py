"""Choose the device by torch.accelerator, as newer scripts do, and shard a model with FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
dist.init_process_group(backend="nccl" if kind == "cuda" else "gloo")
rank = dist.get_rank()
if kind != "cpu":
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
mesh = init_device_mesh(kind, (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).to(kind)
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).to(kind)
for _ in range(3):
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if kind != "cpu":
    torch.accelerator.synchronize()
total = loss.detach().clone()
dist.all_reduce(total)
if rank == 0:
    print(f"{kind}: loss {total.item() / dist.get_world_size():.6f}")
dist.destroy_process_group()
