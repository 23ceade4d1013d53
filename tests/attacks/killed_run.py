"""Train a small net over ranks, save after every step, and die by SIGKILL at a named place.

Run one process per rank: python killed_run.py RANK RANKS STORE FOLDER MICRO_BATCHES PLACE. The functions also serve
ranks of the simulator.
"""

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


def train(folder, ranks, micro_batches, *, resume=None, at=lambda *_: None, levels=False):
    """Train to the last step and return the digest of weights and optimizer; `at` hears step and micro-batch."""
    net = Net(torch.float32)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "rank")) if levels else None
    group = None if mesh is None else Levels(mesh, check_hosts=False)
    gradients = Gradients(net, GlobalBatch(OF, ranks, micro_batches), group=group)
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
    rank, ranks, micro_batches = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[5])
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
    print(train(sys.argv[4], ranks, micro_batches, at=plant(sys.argv[6], rank, ranks)), flush=True)
