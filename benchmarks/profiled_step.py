"""Where isobit's own data-parallel step goes: `isobit profile` of this file, on two gloo ranks.

`isobit profile benchmarks/profiled_step.py --ranks 2` does the same, and any option of it works.
"""

import sys
import tempfile
from pathlib import Path


def run(quick, threads, dtypes):
    from rich.console import Console
    from rich.table import Table

    from isobit.cli.terminal import say
    from isobit.profiling.api import profile
    from isobit.profiling.recording import Recording, record
    from isobit.profiling.report import lines_of, milliseconds, share

    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as folder:
            recording = Recording(Path(__file__), [dtype], ranks=2, steps=2 if quick else 5)
            found = record(recording, Path(folder))
            result = profile(found.traces)
        table = Table("dtype", "rank", "part of a step", "ms", "share")
        for rank in result.ranks:
            steps, whole = len(rank.steps), rank.whole
            for cause, ns in sorted(whole.parts.items(), key=lambda part: -part[1]):
                cells = (cause, milliseconds(ns / steps), share(ns, whole.total))
                table.add_row(dtype, str(rank.rank), *cells)
        Console(width=120, highlight=False).print(table)
        say(f"{dtype}: {'; '.join(found.notes)}")
        for line in lines_of(result):
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
    # The kernels.py and vllm.py of this folder are not the packages of these names, which transformers looks for.
    sys.path = [
        path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent
    ]
    train(sys.argv[1] if len(sys.argv) > 1 else "float32")
