"""Average gradients by hand and pass activations around a ring, with default devices and memory statistics."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
assert torch.cuda.is_available()
assert torch.cuda.current_device() == int(os.environ["LOCAL_RANK"])
name, properties = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0)
weight = torch.full((4,), 0.5, device="cuda", requires_grad=True)
assert weight.device == torch.device("cuda", rank)
assert weight.cuda() is weight
for _step in range(3):
    x = torch.arange(4.0).cuda() + rank
    loss = (weight * x).square().sum()
    loss.backward()
    dist.all_reduce(weight.grad)
    weight.grad /= world_size
    assert weight.grad.is_cuda
    with torch.no_grad():
        weight -= 0.001 * weight.grad
    weight.grad = None
activation = torch.ones(2, device="cuda") * rank
received = torch.empty_like(activation)
batch = [
    dist.P2POp(dist.isend, activation, (rank + 1) % world_size),
    dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
]
for work in dist.batch_isend_irecv(batch):
    work.wait()
assert received[0].item() == (rank - 1) % world_size
torch.cuda.synchronize()
torch.cuda.empty_cache()
if rank == 0:
    total = properties.total_memory / 2**30
    print(
        f"loss {loss.item():.6f}, {torch.cuda.memory_allocated()} of {total:.0f} GB, {name != ''}"
    )
dist.destroy_process_group()
