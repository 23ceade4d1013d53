"""Train in mixed precision with a scaler, a side stream for copies and timing by events."""

import os

import torch
import torch.distributed as dist
from torch import nn

rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cuda")
copies = torch.cuda.Stream()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
for step in range(3):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(8 * step + rank)).pin_memory()
    with torch.cuda.stream(copies):
        x = batch.to(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(copies)
    x.record_stream(torch.cuda.current_stream())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
        loss = out.float().square().mean()
    assert out.dtype == torch.bfloat16
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
end.record()
torch.cuda.synchronize()
dist.all_reduce(loss.detach())
if rank == 0:
    print(f"loss {loss.item():.4f}, {torch.cuda.max_memory_allocated() >= 0}")
    print(start.elapsed_time(end) >= 0, scaler.get_scale())
dist.destroy_process_group()
