"""One sum over ranks as a flat group and as two and three levels: digests, messages and bytes of a rank.

Simulated ranks exchange by collectives, gloo processes by recursive halving. Messages and bytes are counted where they
are posted and compared with benchmarks/scale.py, the model of docs/explanation/scale.md. The control is stock's
hierarchical all-reduce (torch.distributed.all_reduce level by level), whose digests differ.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import scale
from isobit import bits
from isobit.parallel import Levels, all_gather, all_reduce, get_total_norm, reduce_scatter
from isobit.parallel.collectives.communicator import Communicator
from isobit.simulator import World
from isobit.simulator.torch import backend

SHAPES = {  # outermost axis first, as of a mesh
    4: ((4,), (2, 2)),
    8: ((8,), (2, 4), (2, 2, 2)),
    64: ((64,), (8, 8), (4, 4, 4)),
    512: ((512,), (64, 8), (8, 8, 8)),
}
NAMES = ("rack", "host", "rank")
ELEMENTS = 1024


def run(quick, threads, dtypes):
    table = Table(
        "ranks",
        "levels",
        "digest",
        "messages: counted = model",
        "bytes",
        "stock's digest",
        "CPU s",
    )
    wrong = 0
    worlds = [("simulated", n) for n in ((8, 64) if quick else (8, 64, 512))]
    for kind, ranks in [*worlds, ("gloo", 4), ("gloo", 8)]:
        digests, stocks = set(), set()
        for found in (simulated if kind == "simulated" else on_gloo)(ranks):
            digests.add(found["digest"])
            stocks.add(found["stock"])
            wrong += not agrees(found)
            table.add_row(*row(kind, found))
        wrong += len(digests) != 1
        wrong += len(stocks) == 1
    console = Console(highlight=False, width=118)
    console.print(table)
    console.print(
        f"{wrong} of {table.row_count} rows and {len(worlds) + 2} worlds differ from the model or the flat sum"
    )
    return int(wrong > 0)


def agrees(found):
    return found["messages"] == found["model"] and found["bytes"] == found["whole"]


def row(kind, found):
    shape = " × ".join(map(str, found["shape"]))
    sign = "=" if found["messages"] == found["model"] else "≠"
    ranks = torch.Size(found["shape"]).numel()
    return [
        f"{ranks} {kind}",
        shape,
        found["digest"],
        f"{found['messages']} {sign} {found['model']}",
        f"{found['bytes'] / (ELEMENTS * 4):.4f} n",
        found["stock"],
        f"{found['seconds']:.1f}" if "seconds" in found else "",
    ]


def simulated(ranks):
    """Count what the simulated network is given: a share for each other rank of a group."""
    for shape in SHAPES[ranks]:
        posted = []
        collect = backend.RankGroup._collect

        def counted(group, kind, inputs, outputs, *args, collect=collect, posted=posted, **options):
            if (
                group.run is not None
                and dist.get_rank() == 0
                and kind in ("all_to_all", "all_gather")
            ):
                posted += [inputs[0].nbytes] * (group.size() - 1)
            return collect(group, kind, inputs, outputs, *args, **options)

        backend.RankGroup._collect = counted
        begun = time.process_time()
        try:
            found = World(ranks).run(partial(one_rank, shape, posted)).values[0]
        finally:
            backend.RankGroup._collect = collect
        yield {**found, "seconds": time.process_time() - begun}


def one_rank(shape, posted, rank):
    """Return the digest of every sum that training makes, and what one all-reduce posted."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])
    levels = Levels(mesh) if len(shape) > 1 else None
    ranks, mine = dist.get_world_size(), values(rank, ELEMENTS)
    before = len(posted)
    all_reduce(mine, levels)
    messages, sent = len(posted) - before, sum(posted[before:])
    share, uneven = torch.empty(ELEMENTS // ranks), values(rank, 1001)
    reduce_scatter(share, values(rank, ELEMENTS), levels)
    whole = torch.empty(ELEMENTS)
    all_gather(whole, share, levels)
    all_reduce(uneven, levels)
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
    weight.grad = mine
    norm = get_total_norm([weight], group=levels)
    assert bits.equal(whole, mine)
    return {
        "shape": shape,
        "digest": bits.digest({"sum": mine, "uneven": uneven, "norm": norm})[:8],
        "messages": messages,
        "bytes": sent,
        "whole": 2 * (ranks - 1) * ELEMENTS * 4 // ranks,
        "model": int(scale.messages(shape, halving=dist.get_backend() == "gloo")),
        "stock": bits.digest(stock_sum(mesh, rank))[:8],
    }


def stock_sum(mesh, rank):
    """Sum level by level by torch.distributed, innermost first."""
    mine = values(rank, ELEMENTS)
    for axis in reversed(range(mesh.ndim)):
        dist.all_reduce(mine, group=mesh.get_group(axis))
    return mine


def values(rank, count):
    """Draw full mantissas, with exponents over 40 powers of two."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    powers = torch.randint(-20, 20, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), powers)


def on_gloo(ranks):
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found"
        processes.spawn(serve, (ranks, str(Path(folder) / "store"), str(found)), ranks)
        yield from torch.load(found)


def serve(rank, ranks, store, found):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    posted, send = [], Communicator.send

    def counted(comm, tensor, peer, tag):
        posted.append(tensor.nbytes)
        return send(comm, tensor, peer, tag)

    Communicator.send = counted
    rows = [one_rank(shape, posted, rank) for shape in SHAPES[ranks]]
    if rank == 0:
        torch.save(rows, found)
    dist.destroy_process_group()
