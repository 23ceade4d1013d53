"""Train a small language model with DDP, gradient accumulation and clipping, as nanoGPT does."""

import math
import os
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

device = "cuda" if torch.cuda.is_available() else "cpu"
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl" if device == "cuda" else "gloo")
    ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        device = f"cuda:{ddp_local_rank}"
        torch.cuda.set_device(device)
    master_process, seed_offset = ddp_rank == 0, ddp_rank
else:
    master_process, seed_offset = True, 0
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
context = (
    nullcontext() if device_type == "cpu" else torch.autocast(device_type, dtype=torch.bfloat16)
)
context = nullcontext()  # bfloat16 off: losses are compared


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out, self.mlp = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + F.gelu(self.mlp(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=32, width=16):
        super().__init__()
        self.words, self.block = nn.Embedding(vocabulary, width), Block(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.words.weight = self.head.weight

    def forward(self, tokens, targets):
        logits = self.head(self.block(self.words(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(generator):
    data = torch.randint(32, (2, 9), generator=generator)
    x, y = data[:, :-1], data[:, 1:]
    if device_type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device)
    return x.to(device), y.to(device)


torch.manual_seed(1337)
model = GPT().to(device)
scaler = torch.amp.GradScaler(device_type, enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank] if device_type == "cuda" else None)
generator = torch.Generator().manual_seed(1337 + seed_offset)
for step in range(3):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.5 * (1.0 + math.cos(math.pi * step / 3))
    for micro_step in range(2):
        if ddp:
            model.require_backward_grad_sync = micro_step == 1
        with context:
            loss = model(*get_batch(generator)) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {step}: loss {loss.item() * 2:.5f}")
if ddp:
    destroy_process_group()
