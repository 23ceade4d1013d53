"""Where isobit's own data-parallel step goes: `isobit profile` of this file, on two gloo ranks.

`isobit profile benchmarks/profiled_step.py --ranks 2` does the same, and any option of it works.
"""

import sys
import tempfile
from pathlib import Path


def run(quick, threads, dtypes):
    from isobit.cli.terminal import say
    from isobit.profiling.api import profile
    from isobit.profiling.recording import Recording, record
    from isobit.profiling.report import lines_of

    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as folder:
            recording = Recording(Path(__file__), [dtype], ranks=2, steps=2 if quick else 5)
            found = record(recording, Path(folder))
            say(f"{dtype}: {'; '.join(found.notes)}")
            for line in lines_of(profile(found.traces)):
                say(line)
    return 0


def train(dtype):
    """Train the gate's tiny model with isobit until the recording ends."""
    import torch
    import torch.distributed as dist

    from isobit.gates.training.train_isobit import make_run, take_step
    from isobit.gates.training.workload import WORKLOADS, RankLayout

    dist.init_process_group("gloo")
    ours = make_run(WORKLOADS["tiny"], RankLayout(dist.get_world_size(), 1), getattr(torch, dtype))
    for step in range(20):
        take_step(ours, step)
        ours.optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "float32")
