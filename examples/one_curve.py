"""Train three steps in one batch, in micro-batches and on ranks: isobit's weights have one digest, stock's many.

Run it directly (ranks are simulated), or as real processes: torchrun --nproc-per-node 2 examples/one_curve.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import isobit
from isobit import Samples, bits
from isobit.optim import AdamW
from isobit.parallel import GlobalBatch, Gradients, LossMeter, clip_grad_norm_
from isobit.simulator import World

LENGTHS = (5, 9, 3, 12, 1, 7, 4, 6)  # tokens of each sample of the global batch
STEPS, VOCABULARY, WIDTH = 3, 64, 96


class Model(nn.Module):
    """Return log-probabilities of the targets, with every sum in isobit's order."""

    def __init__(self):
        super().__init__()
        self.table, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.up, self.down = isobit.nn.Linear(WIDTH, 4 * WIDTH), isobit.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, ids, targets, samples):
        x = isobit.embedding(ids, self.table.weight, samples=samples)
        x = x + self.down(isobit.gelu(self.up(x, samples)), samples)
        return isobit.linear_logprob(x, self.head.weight, targets, samples=samples)


class StockModel(Model):
    """Compute the same with stock PyTorch."""

    def forward(self, ids, targets):
        x = self.table(ids)
        x = x + linear(
            gelu(linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias
        )
        return -cross_entropy(self.head(x), targets, reduction="none")


def tokens(step, held):
    """Return ids and targets of a run of samples, packed."""
    drawn = torch.randint(
        0, VOCABULARY, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(step)
    )
    return drawn[:, sum(LENGTHS[: held.start]) : sum(LENGTHS[: held.stop])]


def train(rank, batch):
    """Return the last loss and a digest of the weights, on one rank of `batch.ranks`."""
    torch.manual_seed(0)
    model = Model()
    gradients, optimizer = Gradients(model, batch), AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        meter = LossMeter()
        for micro in range(batch.micro_batches):
            held = batch.samples(rank, micro)
            with gradients.micro_batch(micro) as share:
                samples = Samples.packed(
                    LENGTHS[held.start : held.stop], first=share.first, total=share.total
                )
                logprobs = model(*tokens(step, held), samples)
                loss = isobit.exact_sum(logprobs) / -sum(LENGTHS)  # tokens of the global batch
                loss.backward()
            meter.add(-logprobs)
        loss = meter.value()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
    return f"{loss:.15f} {bits.digest(model)[:16]}"


def train_stock(rank, batch):
    """Train the same with autograd's accumulation and torch's all_reduce."""
    torch.manual_seed(0)
    model = StockModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(batch.micro_batches):
            loss = -model(*tokens(step, batch.samples(rank, micro))).sum() / sum(LENGTHS)
            loss.backward()
            total += loss.detach()
        if dist.is_initialized():
            for tensor in (total, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(tensor)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return f"{total:.15f} {bits.digest(model)[:16]}"


def show(batch, ours, theirs):
    print(
        f"{batch.ranks} ranks × {batch.micro_batches} micro-batches   isobit {ours}   stock {theirs}"
    )


def on_processes():
    dist.init_process_group("gloo")
    for micro in (1, 2, 4):
        batch = GlobalBatch(len(LENGTHS), dist.get_world_size(), micro)
        found = [run(dist.get_rank(), batch) for run in (train, train_stock)]
        if dist.get_rank() == 0:
            show(batch, *found)
    dist.destroy_process_group()


def on_simulated_ranks():
    digests = set()
    for ranks, micro in ((1, 1), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)):
        batch = GlobalBatch(len(LENGTHS), ranks, micro)
        if ranks == 1:
            found = [run(0, batch) for run in (train, train_stock)]
        else:
            found = [World(ranks).run(run, batch).values[0] for run in (train, train_stock)]
        show(batch, *found)
        digests.add(found[0])
    assert len(digests) == 1, digests


torch.set_num_threads(1)
if "RANK" in os.environ:
    on_processes()
else:
    on_simulated_ranks()
