"""Train with a parameter server by messages: rank 0 keeps the weights, the others send gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS = 3
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, workers = dist.get_rank(), dist.get_world_size() - 1
if device.type == "cuda":
    torch.cuda.set_device(rank)
torch.manual_seed(0)
model = nn.Linear(6, 3).to(device)
count = sum(p.numel() for p in model.parameters())


def serve():
    weights = parameters_to_vector(model.parameters()).detach()
    for step in range(STEPS):
        total, losses = torch.zeros_like(weights), torch.zeros((), device=device)
        for worker in range(1, workers + 1):
            message = torch.empty(count + 1, device=device)
            dist.recv(message, src=worker)
            total += message[:-1]
            losses += message[-1]
        weights -= 0.1 * total / workers
        for worker in range(1, workers + 1):
            dist.send(weights, dst=worker)
        print(f"step {step}: loss {losses.item() / workers:.5f}")


def work():
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(4, 6, generator=generator).to(device)
        y = torch.randint(0, 3, (4,), generator=generator).to(device)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        gradient = parameters_to_vector([p.grad for p in model.parameters()])
        dist.send(torch.cat([gradient, loss.detach().reshape(1)]), dst=0)
        weights = torch.empty(count, device=device)
        dist.recv(weights, src=0)
        vector_to_parameters(weights, model.parameters())


serve() if rank == 0 else work()
dist.barrier()
dist.destroy_process_group()
