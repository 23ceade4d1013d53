"""Train a small net over ranks, save after every step, and die by SIGKILL at a named place.

Run one process per rank: python killed_run.py RANK STORE FOLDER MICRO_BATCHES PLACE SHAPE... SHAPE is the number of
ranks, or the sizes of their levels, outermost first. The functions also serve ranks of the simulator.
"""

import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh

import isobit
from isobit import Samples, bits
from isobit.optim import AdamW
from isobit.parallel import GlobalBatch, Gradients, Levels, checkpoint
from isobit.parallel.collectives.communicator import Communicator
from tests.attacks.small_net import OF, TOKENS, WIDTH, Net

STEPS, DEADLY = 4, 2  # the step in which a rank dies, counted from 0: steps 0 and 1 are saved


def draw(step):
    return torch.randn(OF, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(folder, shape, micro_batches, *, resume=None, at=lambda *_: None):
    """Train to the last step and return the digest of weights and optimizer; `at` hears step and micro-batch.

    Several sizes in `shape` are levels, outermost first; one is a flat group.
    """
    net = Net(torch.float32)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    group = None
    if len(shape) > 1:
        names = ("rack", "host", "rank")[-len(shape) :]
        group = Levels(init_device_mesh("cpu", shape, mesh_dim_names=names))
    gradients = Gradients(net, GlobalBatch(OF, math.prod(shape), micro_batches), group=group)
    first = 0 if resume is None else checkpoint.load(resume, net, optimizer).step
    for step in range(first, STEPS):
        optimizer.zero_grad()
        for index in range(micro_batches):
            with gradients.micro_batch(index) as share:
                samples = Samples.packed(
                    [TOKENS] * share.size, first=share.first, total=share.total
                )
                x = draw(step)[share.first : share.first + share.size]
                at(step, index)
                isobit.exact_sum(net(x, samples).square()).backward()
        optimizer.step()
        if folder is not None:
            checkpoint.save(Path(folder) / f"step-{step + 1}", net, optimizer, step=step + 1)
    gradients.close()
    state = {
        f"{n} {k}": v for n, p in net.named_parameters() for k, v in optimizer.state[p].items()
    }
    return bits.digest({**dict(net.named_parameters()), **state})


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_the(count, owner, name):
    """Die at the call number `count` (from 0) of a function."""
    right, calls = getattr(owner, name), []

    def counted(*given, **named):
        calls.append(None)
        return right(*given, **named) if len(calls) <= count else die()

    setattr(owner, name, counted)


def die_at_a_message(distance, count=0):
    """Die at the message number `count` (from 0) to a rank that is so many ranks away."""
    right, calls = Communicator.send, []

    def send(comm, tensor, peer, tag):
        there = dist.get_global_rank(comm.group, peer)
        if abs(there - dist.get_rank()) == distance:
            calls.append(None)
        return right(comm, tensor, peer, tag) if len(calls) <= count else die()

    Communicator.send = send


def plant(place, rank, ranks):
    """Return what `train` calls at every micro-batch, and replace the function in which the rank is to die."""
    if rank != (0 if place in ("record", "rename", "metadata") else ranks - 1):
        return lambda *_: None

    def at(step, index):
        if step != DEADLY or index:
            return
        if place == "micro-batch":
            die()
        elif place == "exchange":
            die_at_the(1, Communicator, "send")
        elif place == "message in a host":  # of two ranks, as the next one is
            die_at_a_message(1)
        elif place == "message across hosts":
            die_at_a_message(2)
        elif place == "message across racks":
            die_at_a_message(4)
        elif place == "sums on their way back":
            die_at_a_message(1, count=1)
        elif place == "data file":
            die_at_the(1, filesystem, "_write_item")
        elif place == "metadata":
            die_at_the(0, filesystem.FileSystemWriter, "finish")
        elif place == "record":
            die_at_the(0, checkpoint, "write_text")
        elif place == "rename":
            die_at_the(0, Path, "rename")

    return at


if __name__ == "__main__":
    rank, (store, folder, micro_batches, place) = int(sys.argv[1]), sys.argv[2:6]
    shape = tuple(map(int, sys.argv[6:]))
    ranks = math.prod(shape)
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    print(train(folder, shape, int(micro_batches), at=plant(place, rank, ranks)), flush=True)
