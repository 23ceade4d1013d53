"""Record a small training run on gloo ranks under torch.profiler, with one cause that makes one rank late.

`python gloo_runs.py RANK RANKS FOLDER CAUSE LATE` is one rank; `record` starts all of them.
"""

import subprocess
import sys
import time
from pathlib import Path

DELAY = 0.08  # seconds per step
CAUSES = {
    "loader": "idle: data loader",
    "forward": "compute",
    "backward": "compute",
    "batch": "compute",
    "sleep": "idle: nothing recorded",
    "optimizer": "idle: host in the optimizer",
}


def record(folder, cause="", late=1, ranks=2):
    """Run it and return the traces; `cause` makes rank `late` slow, and "" makes no rank slow."""
    words = [
        [sys.executable, __file__, str(rank), str(ranks), str(folder), cause, str(late)]
        for rank in range(ranks)
    ]
    running = [
        subprocess.Popen(one, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for one in words
    ]
    for process in running:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
    return sorted(Path(folder).glob("rank*.json"))


def train(rank, ranks, folder, cause):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    def compute():
        x = torch.ones(192, 192)
        begin = time.perf_counter()
        while time.perf_counter() - begin < DELAY:
            x = torch.mm(x, x).clamp_(max=1)

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 7 * 16

        def __getitem__(self, index):
            if cause == "loader":
                time.sleep(DELAY / 16)
            return torch.full((256,), index / 112)

    class Layer(nn.Linear):
        def forward(self, x):
            if cause == "forward":
                compute()
            if cause == "batch":
                x = x.repeat(400, 1)
            return super().forward(x)

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    model = nn.Sequential(Layer(256, 256), nn.ReLU(), nn.Linear(256, 256))
    if cause == "backward":
        model[0].register_full_backward_hook(lambda *_: compute())
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if cause == "optimizer":
        # Called inside the annotation of the step.
        optimizer.step = slow_step(optimizer)
    once = schedule(wait=1, warmup=1, active=4, repeat=1)
    export = f"{folder}/rank{rank}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=once,
        record_shapes=True,
        on_trace_ready=lambda found: found.export_chrome_trace(export),
    ) as p:
        for x in torch.utils.data.DataLoader(Samples(), 16):
            if cause == "sleep":
                time.sleep(DELAY)
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            p.step()
    dist.destroy_process_group()


def slow_step(optimizer):
    import torch

    plain = type(optimizer).step

    def step():
        with torch.profiler.record_function("Optimizer.step#slow"):
            time.sleep(DELAY)
        plain(optimizer)

    return step


if __name__ == "__main__":
    rank, ranks, folder, cause, late = sys.argv[1:]
    train(int(rank), int(ranks), folder, cause if rank == late else "")
