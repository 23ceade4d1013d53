"""Record small training runs on gloo ranks under torch.profiler, each with one cause that makes it slow, or none.

`python gloo_runs.py RANK RANKS FOLDER RUNS` is one rank, which takes part in all runs, one after another; `record`
starts all ranks. A run is "cause@rank": that rank is slow for that cause. A cause without a rank is of all ranks, and
"none" is a right run.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

DELAY, LONGEST = 0.08, 0.5  # seconds per step that are planted; more on a busy machine
STEPS = 8  # that are recorded, after two others
COPIES = (
    64  # of each batch: a right step computes for some milliseconds, longer than a wake-up takes
)
# The cause of a rank that is late, as the account names it.
CAUSES = {
    "loader": "idle: data loader",
    "forward": "compute",
    "backward": "compute",
    "batch": "compute",
    "sleep": "idle: nothing recorded",
    "optimizer": "idle: host in the optimizer",
}
SLEEPING = ("loader", "sleep", "optimizer")
# What is found if all ranks are slow for the cause.
GLOBAL = {"loader": "data-loader", "messages": "exposed-communication"}


def record(folder, runs, ranks=2):
    """Take part in all runs; return the folder of each run's traces."""
    runs = [run if isinstance(run, tuple) else (run, run) for run in runs]
    for name, _ in runs:
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
    words = " ".join(f"{name}={run}" for name, run in runs)
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(ranks), str(folder), words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        for process in running:
            _, err = process.communicate(timeout=600)
            assert process.returncode == 0, err[-2000:]
    finally:
        for process in running:
            process.kill()
    return {name: Path(folder) / name for name, _ in runs}


def take_part(rank, ranks, folder, runs):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    # A planted delay is several times as long as a right step, and one in which a rank sleeps as what the machine takes
    # from a step; one in which it computes is longer by itself where cores are rare.
    times = train(f"{folder}/calibration{rank}.json", "none", 0.0)
    ran = 4 * median(one["ran"] for one in times) / 1e9
    taken = 4 * median(one["waited"] + one["stolen"] for one in times) / 1e9
    longest = torch.tensor([ran, ran + taken])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    computing, sleeping = longest.clamp(DELAY, LONGEST).tolist()
    if rank == 0:
        Path(folder, "planted").write_text(json.dumps([computing * 1e9, sleeping * 1e9]))
    for word in runs.split():
        name, run = word.split("=")
        cause, _, late = run.partition("@")
        torch.manual_seed(0)
        slow = cause if late in ("", str(rank)) else "none"
        delay = sleeping if cause in SLEEPING else computing
        train(f"{folder}/{name}/rank{rank}.json", slow, delay)
        dist.barrier()
    dist.destroy_process_group()


def train(export, cause, delay):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    from isobit.profiling.recorded_rank import CoreTimes

    square = torch.ones(768, 768)  # large, so that the time is in operators
    torch.mm(square, square)
    begin = time.thread_time()
    torch.mm(square, square)
    products = round(delay / (time.thread_time() - begin)) + 1

    def compute():
        for _ in range(
            products
        ):  # no clock inside: a call of the system would give the core away between operators
            torch.mm(square, square)

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return (STEPS + 2) * 16

        def __getitem__(self, index):
            if cause == "loader":
                time.sleep(delay / 16)
            return torch.full((256,), index / 112)

    class Layer(nn.Linear):
        def forward(self, x):
            if cause == "forward":
                compute()
            more = int(400 * delay / DELAY) if cause == "batch" else 0
            return super().forward(x.repeat(COPIES + more, 1))

    class Slow(torch.optim.AdamW):
        @torch.no_grad()
        def step(self):
            if cause == "optimizer":
                time.sleep(delay)
            return super().step()

    model = nn.Sequential(Layer(256, 256), nn.ReLU(), nn.Linear(256, 256))
    if cause == "backward":
        model[0].register_full_backward_hook(lambda *_: compute())
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = Slow(model.parameters())
    once = schedule(wait=1, warmup=1, active=STEPS, repeat=1)
    message = torch.ones(int(6_000_000 * delay / DELAY) if cause == "messages" else 1)
    clock, times = CoreTimes(), []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=once,
        record_shapes=True,
        on_trace_ready=lambda found: found.export_chrome_trace(export),
    ) as p:
        for x in torch.utils.data.DataLoader(Samples(), 16):
            if cause == "sleep":
                time.sleep(delay)
            model(x).pow(2).mean().backward()
            if cause == "messages":
                dist.all_reduce(message)
            optimizer.step()
            optimizer.zero_grad()
            times.append(clock.mark())
            p.step()
    return times


if __name__ == "__main__":
    take_part(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
