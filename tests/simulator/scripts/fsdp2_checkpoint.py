"""Shard a model with FSDP2 and mixed precision off, save it with distributed checkpoints, and load it again."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank = int(os.environ["LOCAL_RANK"])
if torch.accelerator.is_available():
    device = torch.device(f"{torch.accelerator.current_accelerator()}:{rank}")
    torch.accelerator.device_index(rank)
    torch.accelerator.set_device_index(rank)
else:
    device = torch.device("cpu")
dist.init_process_group(torch.distributed.get_default_backend_for_device(device))
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
model = nn.Sequential(*layers).to(device)
for layer in model:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy())
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)


def step():
    x = torch.randn(2, 16, generator=generator).to(device)
    loss = (model(x) - x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total := loss.detach().clone())
    return total.item() / dist.get_world_size()


first = [step(), step()]
folder = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
dist.broadcast_object_list(folder, src=0)
states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
dcp.save(states, checkpoint_id=os.path.join(folder[0], "fsdp2"))
step()
dcp.load(states, checkpoint_id=os.path.join(folder[0], "fsdp2"))
set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
again = step()
if rank == 0:
    print(f"loss {first[0]:.5f} {first[1]:.5f}, from the checkpoint {again:.5f}")
dist.destroy_process_group()
