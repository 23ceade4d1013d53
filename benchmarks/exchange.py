"""The exchange against gloo's own all_reduce: 2 and 4 processes on this machine, fp32, by turns.

A ratio is gloo's time / ours in one round, since other work on the machine moves both; shown are the median and the
quartiles of the rounds. `cpu` is the same of rank 0's processor time. Bytes are counted where rank 0 posts messages.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import FileStore

from benchmarks.ratios import Ratio
from isobit import bits
from isobit.order.tree import merge
from isobit.parallel.collectives.communicator import Communicator
from isobit.parallel.collectives.tree_collectives import all_reduce

RANKS = (2, 4)
MEGABYTES = (1, 4, 16, 64, 256)
ROUNDS = {1: 41, 4: 41, 16: 21, 64: 11, 256: 11}


def run(quick, threads, dtypes):
    table = Table(
        "processes",
        "MB",
        "gloo ms",
        "ours ms",
        "ratio",
        "quartiles",
        "cpu",
        "quartiles",
        "bytes sent",
        "2(P−1)/P",
        "digest of the sum",
    )
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            found = Path(folder) / f"found{ranks}"
            sizes = MEGABYTES[:-1] if quick else MEGABYTES
            processes.spawn(
                serve, (ranks, str(Path(folder) / f"store{ranks}"), str(found), sizes), ranks
            )
            for row in torch.load(found):
                table.add_row(*row)
    Console(highlight=False, width=140).print(table)
    return 0


def serve(rank, ranks, store, found, sizes):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = [measure(rank, ranks, megabytes) for megabytes in sizes]
    if rank == 0:
        torch.save(rows, found)
    dist.destroy_process_group()


def measure(rank, ranks, megabytes):
    elements = megabytes << 18
    digest, sent = check(rank, ranks, elements)
    tensor = torch.zeros(elements)
    contenders = {"gloo": dist.all_reduce, "ours": all_reduce}
    times = {name: [] for name in contenders}
    spent = {name: [] for name in contenders}
    for _ in range(ROUNDS[megabytes]):
        for name, function in contenders.items():
            dist.barrier()
            start, worked = time.perf_counter(), time.process_time()
            function(tensor)
            spent[name].append(time.process_time() - worked)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    medians = [f"{statistics.median(times[name]) * 1e3:.2f}" for name in contenders]
    ratios = [cell for s in (times, spent) for cell in Ratio.of(s["gloo"], s["ours"]).cells()]
    share = sent / (elements * 4)
    return [
        str(ranks),
        str(megabytes),
        *medians,
        *ratios,
        f"{share:.4f} n",
        f"{2 * (ranks - 1) / ranks:.4f} n",
        digest,
    ]


def check(rank, ranks, elements):
    """Times nothing whose bits are not the tree's; counts what is posted."""
    values = [
        torch.randn(elements, generator=torch.Generator().manual_seed(r)) for r in range(ranks)
    ]
    mine, sent, post = values[rank].clone(), [], Communicator.send

    def counted(line, tensor, peer, tag):
        sent.append(tensor.numel() * tensor.element_size())
        return post(line, tensor, peer, tag)

    Communicator.send = counted
    all_reduce(mine)
    Communicator.send = post
    assert bits.equal(mine, merge(values, torch.add))
    return bits.digest(mine)[:8], sum(sent)
