"""Train an MLP with tensor parallelism, after PyTorch's examples of torch.distributed.tensor.parallel."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(nn.Module):
    """Two layers, one sharded by columns and one by rows."""

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 128)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(128, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


_world_size = int(os.environ["WORLD_SIZE"])
device_type = (
    torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
)
device_mesh = init_device_mesh(device_type=device_type, mesh_shape=(_world_size,))
_rank = device_mesh.get_rank()
torch.manual_seed(0)
tp_model = ToyModel().to(device_type)
tp_model = parallelize_module(
    module=tp_model,
    device_mesh=device_mesh,
    parallelize_plan={"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()},
)
optimizer = torch.optim.AdamW(tp_model.parameters(), lr=0.02, foreach=True)
for i in range(3):
    torch.manual_seed(i)  # ranks of one group must see one batch
    inp = torch.rand(4, 10, device=device_type)
    loss = tp_model(inp).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if _rank == 0:
        print(f"Tensor Parallel iter {i} loss {loss.item():.5f}")
dist.destroy_process_group()
