"""A data-parallel training step against stock DDP, over gloo: stock's time / ours, and what partials hold in memory."""

import dataclasses
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table

from benchmarks.ratios import ROUNDS, Ratio
from isobit.gates.training.launcher import Job
from isobit.gates.training.rank_layout_gate import judge, run_jobs
from isobit.gates.training.train_isobit import make_run, take_step
from isobit.gates.training.train_stock import StockRun
from isobit.gates.training.workload import WORKLOADS, RankLayout

TOKENS, RANKS = 64, (2, 4)


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=118)
    verdict = judge(
        run_jobs([Job(RankLayout(1), "tiny", "float32"), Job(RankLayout(2, 2), "tiny", "float32")])
    )
    console.print(f"gate: {verdict.weights} digest of {verdict.layouts} layouts")
    if not verdict.kept:
        return 1
    table = Table(
        "ranks",
        "micro-batches",
        "dtype",
        "stock DDP s",
        "ours s",
        "ratio",
        "quartiles",
        "partials",
    )
    rounds = ROUNDS if quick else 2 * ROUNDS
    for ranks in RANKS:
        for dtype in dtypes:
            for micro in (1, 4):
                with (
                    tempfile.TemporaryDirectory() as folder,
                    console.status(f"{ranks} ranks, {dtype}, {micro}"),
                ):
                    out = os.path.join(folder, "times")
                    processes.spawn(
                        time_rank, (ranks, micro, dtype, rounds, folder, out), nprocs=ranks
                    )
                    found = torch.load(out)
                ours, stock = (statistics.median(found[side]) for side in ("isobit", "stock"))
                held = f"{found['peak'] / 2**20:,.0f} MiB"
                table.add_row(
                    str(ranks),
                    str(micro),
                    dtype,
                    f"{stock:.3f}",
                    f"{ours:.3f}",
                    *Ratio.of(found["stock"], found["isobit"]).cells(),
                    held,
                )
    console.print(table)
    return 0


def time_rank(rank, ranks, micro, dtype, rounds, folder, out):
    """Both sides in every process, by turns; the first round warms up."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    workload = dataclasses.replace(WORKLOADS["whole"], layers=2, shortest=TOKENS, longest=TOKENS)
    kind = getattr(torch, dtype)
    ours = make_run(workload, RankLayout(ranks, micro), kind)
    stock = StockRun(workload, RankLayout(ranks, micro, 1, "ddp"), kind)
    times = {"isobit": [], "stock": []}
    for turn in range(rounds + 1):
        for side, step in (("stock", stock.take_step), ("isobit", lambda at: take_step(ours, at))):
            dist.barrier()
            started = time.perf_counter()
            step(turn)
            (ours if side == "isobit" else stock).optimizer.zero_grad()
            dist.barrier()
            if turn:
                times[side].append(time.perf_counter() - started)
    if rank == 0:
        torch.save({**times, "peak": ours.gradients.peak_bytes}, out)
    dist.destroy_process_group()
