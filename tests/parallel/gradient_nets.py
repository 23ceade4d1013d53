"""A small model and a global batch of unequal samples; gradients of the whole batch and of shares."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import isobit
from isobit import Samples, bits
from isobit.parallel import GlobalBatch, Gradients
from isobit.simulator import World

LENGTHS = (5, 9, 3, 12, 1, 7, 4, 6)
VOCABULARY, WIDTH = 24, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = isobit.nn.Linear(WIDTH, 2 * WIDTH), isobit.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, samples):
        return x + self.down(isobit.gelu(self.up(x, samples)), samples)


class Net(nn.Module):
    """Embedding, norm, a block and a head; `aside` is used where it is asked for, `idle` never."""

    def __init__(self, dtype=torch.float32, tied=False):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.Parameter(torch.randn(WIDTH))
        self.block, self.aside, self.idle = (
            Block(),
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(7)),
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.to(dtype)

    def forward(self, ids, targets, samples, aside=False):
        x = isobit.embedding(ids, self.table.weight, samples=samples)
        x = isobit.rms_norm(x, self.norm, samples=samples)
        x = self.block(x, samples)
        if aside:
            x = isobit.rms_norm(x, self.aside, samples=samples)
        return isobit.linear_logprob(x, self.head.weight, targets, samples=samples).clone()


def make(dtype=torch.float32, frozen=("aside", "idle"), **options):
    torch.manual_seed(3)
    net = Net(dtype, **options)
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


def tokens(first, stop):
    """Packed ids and targets of these samples."""
    drawn = torch.randint(
        0, VOCABULARY, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(4)
    )
    return drawn[:, sum(LENGTHS[:first]) : sum(LENGTHS[:stop])]


def loss_of(net, held, share=None, **options):
    first, of = (0, None) if share is None else (share.first, share.total)
    samples = Samples.packed(LENGTHS[held.start : held.stop], first=first, total=of)
    return isobit.exact_sum(net(*tokens(held.start, held.stop), samples, **options)) / -sum(LENGTHS)


def read(net):
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {
        name: (g.full_tensor() if isinstance(g, DTensor) else g).clone()
        for name, g in found.items()
    }


def whole(net):
    """By plain autograd."""
    loss_of(net, range(len(LENGTHS))).backward()
    return read(net)


def step(gradients, net, wrong=None, **options):
    batch = gradients.batch
    for micro in range(batch.micro_batches):
        with gradients.micro_batch(micro) as share:
            loss = loss_of(net, batch.samples(gradients.rank, micro), share, **options)
            if wrong is not None and micro == batch.micro_batches - 1:
                wrong(loss)
            loss.backward()


def collect(net, ranks, micro, order="rank"):
    gradients = Gradients(net, GlobalBatch(len(LENGTHS), ranks, micro, order))
    step(gradients, net)
    return gradients


def on_ranks(ranks, function):
    return [function(0)] if ranks == 1 else World(ranks).run(function).values


def plain(net):
    return net


def sharded(net):
    fully_shard(net.block)
    return fully_shard(net)


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in expected if not bits.equal(found[name], expected[name])]
