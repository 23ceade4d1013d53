"""Right programs of many shapes, on which no watch may raise a false alarm: wrappers, shards, stages, lone buffers."""

import asyncio
import os
import queue
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WIDTH = 8


def build(seed, *extra):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), *extra, nn.Linear(16, WIDTH))


def train(model, seed, share, steps=2, optimizer=torch.optim.AdamW):
    """`share` names the data: ranks that hold parts of one replica are fed alike."""
    update = optimizer(model.parameters(), lr=0.01)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10_000 * seed + 10 * step + share)
        x = torch.randn(4, WIDTH, generator=generator)
        update.zero_grad()
        (model(x) - x).square().mean().backward()
        update.step()
    return model


def wrapped(rank, seed):
    """DDP with dropout seeded per rank, and batch norm whose buffers rank 0 broadcasts at each forward."""
    model = DistributedDataParallel(build(seed, nn.BatchNorm1d(16), nn.Dropout(0.2)))
    torch.manual_seed(1000 + rank)
    train(model, seed, rank)
    with torch.no_grad():
        model.eval()(torch.ones(2, WIDTH))


def one_batch_for_all(rank, seed):
    """A test of DDP against one worker feeds all ranks alike, on purpose."""
    model = DistributedDataParallel(build(seed))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    for _ in range(2):
        update.zero_grad()
        model(x).square().mean().backward()
        update.step()


def overlapped(rank, seed):
    """Asynchronous all-reduces from hooks, waited for before the step."""
    model, works = build(seed), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True))
        )
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        update.zero_grad()
        x = torch.randn(
            4, WIDTH, generator=torch.Generator().manual_seed(100 * seed + 10 * step + rank)
        )
        model(x).square().mean().backward()
        while works:
            works.pop().wait()
        update.step()


def sharded_by_hand(rank, seed):
    """Column-parallel shards of one seed: weights and zero biases begin alike on all ranks, and part."""
    torch.manual_seed(seed)
    layer = nn.Linear(WIDTH, 4)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(100 * seed + rank))
    nn.init.zeros_(layer.bias)
    update = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    for _ in range(2):
        update.zero_grad()
        layer(x).square().mean().backward()
        update.step()


def stages_of_one_seed(rank, seed):
    """Pipeline stages that begin alike since every rank seeds alike: they send each other messages, and part."""
    torch.manual_seed(seed)
    stage, ranks = nn.Linear(WIDTH, WIDTH), dist.get_world_size()
    update = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + step))
        if rank:
            dist.recv(x, src=rank - 1)
        x.requires_grad_(rank > 0)
        y = stage(x)
        if rank < ranks - 1:
            dist.send(y.detach(), dst=rank + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, src=rank + 1)
            y.backward(gradient)
        else:
            y.square().mean().backward()
        if rank:
            dist.send(x.grad, dst=rank - 1)
        update.step()
        update.zero_grad()


def accumulates_in_closures(rank, seed):
    """As Lightning does: the first micro-batch clears the gradients, and the step's closure runs the last."""
    model = DistributedDataParallel(build(seed))
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def micro_batch(step, at):
        generator = torch.Generator().manual_seed(1000 * seed + 100 * step + 10 * at + rank)
        if at == 0:
            update.zero_grad()
        loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
        loss.backward()
        return loss

    for step in range(3):
        with model.no_sync():
            micro_batch(step, 0)
        update.step(lambda step=step: micro_batch(step, 1))


def zero_one(rank, seed):
    """Each rank holds the optimizer of one parameter, and broadcasts what it updated."""
    model = build(seed)
    parameters = list(model.parameters())
    update = torch.optim.AdamW([parameters[rank]], lr=0.01)
    for step in range(2):
        x = torch.randn(
            4, WIDTH, generator=torch.Generator().manual_seed(100 * seed + 10 * step + rank)
        )
        model.zero_grad()
        model(x).square().mean().backward()
        for owner, parameter in enumerate(parameters):
            dist.reduce(parameter.grad, dst=owner)
        update.step()
        for owner, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=owner)


def sparse_and_by_name(rank, seed):
    """Sparse gradients; tokens passed by name, behind positions that are the same on all ranks."""
    torch.manual_seed(seed)

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = (
                nn.Embedding(32, 4, sparse=True),
                nn.Embedding(8, 4, sparse=True),
            )

        def forward(self, *, tokens):
            return self.places(torch.arange(tokens.shape[-1])) + self.words(tokens)

    model = Words()
    update = torch.optim.SparseAdam(list(model.parameters()))
    for step in range(2):
        generator = torch.Generator().manual_seed(100 * seed + 10 * step + rank)
        update.zero_grad()
        model(
            tokens=torch.randint(32, (2, 3 + step), generator=generator)
        ).square().sum().backward()
        for parameter in model.parameters():
            gradient = parameter.grad.to_dense()
            dist.all_reduce(gradient)
            parameter.grad = gradient.to_sparse(1)
        update.step()


def fully_sharded(rank, seed):
    from torch.distributed.fsdp import fully_shard

    train(
        fully_shard(build(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),))), seed, rank
    )


def fully_sharded_of_old(rank, seed):
    from torch.distributed.fsdp import FullyShardedDataParallel

    train(FullyShardedDataParallel(build(seed), device_id=torch.device("cpu")), seed, rank)


def buckets_of_one_buffer(rank, seed):
    """Gradients lie in one flat buffer; its second half is written while its first is reduced."""
    flat = torch.randn(2 * WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))
    first, second = flat.chunk(2)
    work = dist.all_reduce(first, async_op=True)
    second.mul_(2)
    later = dist.all_reduce(second, async_op=True)
    work.wait()
    first.div_(dist.get_world_size())
    later.wait()


def tensor_parallel(rank, seed):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    train(
        parallelize_module(build(seed), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
        seed,
        0,
    )


def two_dimensions(rank, seed):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(
        build(seed), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    train(fully_shard(model, mesh=mesh["data"]), seed, rank // 2)


def shared_path(rank):
    """A path that no file has, the same on all ranks."""
    path = [os.path.join(tempfile.mkdtemp(), "ready") if rank == 0 else ""]
    dist.broadcast_object_list(path, src=0)
    return path[0]


def polls_a_file(rank, seed):
    """With a sleep, as scripts do while another rank downloads; and with a time limit of their own."""
    path, begun = shared_path(rank), time.time()
    if rank == seed % 4:
        time.sleep(20.0)
        with open(path, "w") as file:
            file.write("downloaded")
    while not os.path.exists(path):
        assert time.time() - begun < 60.0
        time.sleep(0.5)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(os.path.dirname(path))


def polls_without_sleep(rank, seed):
    """A file, a key of the store, the time and a handle, each in a loop that does nothing else."""
    path, store = shared_path(rank), c10d._get_default_store()
    if rank == seed % 4:
        time.sleep(3.0)
        with open(path, "w"):
            store.set("ready", "1")
    while not Path(path).exists():
        pass
    while not store.check(["ready"]):
        pass
    until = time.monotonic() + 0.01
    while time.monotonic() < until:
        pass
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    assert x.tolist() == [4.0, 4.0]
    if rank == 0:
        shutil.rmtree(os.path.dirname(path))


def communicates_on_threads(rank, seed):
    """One thread and a pool, each with a group of its own, while the main thread waits by event, queue and join."""
    groups = [dist.new_group(range(4)) for _ in range(3)]
    done, out = threading.Event(), queue.Queue()

    def exchange(index):
        x = torch.full((2,), float(rank + index))
        dist.all_reduce(x, group=groups[index])
        return x[0].item()

    thread = threading.Thread(target=lambda: (out.put(exchange(0)), done.set()))
    thread.start()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, (1, 2))) == [10.0, 14.0]
    assert done.wait(timeout=60.0)
    assert out.get(timeout=60.0) == 6.0
    thread.join()


def beats_beside(rank, seed):
    """A daemon that never ends, a timer, and an event loop that waits for a time and for a thread."""

    def beat():
        while True:
            time.sleep(10.0)

    async def wait():
        await asyncio.sleep(30.0)
        await asyncio.get_running_loop().run_in_executor(None, dist.barrier)

    threading.Thread(target=beat, daemon=True).start()
    timer = threading.Timer(5.0, lambda: None)
    timer.start()
    asyncio.run(wait())
    timer.join()
    dist.barrier()


PROGRAMS = [
    polls_a_file,
    polls_without_sleep,
    communicates_on_threads,
    beats_beside,
    wrapped,
    one_batch_for_all,
    overlapped,
    buckets_of_one_buffer,
    sharded_by_hand,
    stages_of_one_seed,
    accumulates_in_closures,
    zero_one,
    sparse_and_by_name,
    fully_sharded,
    fully_sharded_of_old,
    tensor_parallel,
    two_dimensions,
]
