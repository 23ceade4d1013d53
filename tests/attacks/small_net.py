"""A small model that does on request what `Gradients` must refuse, and its steps over reducers in the simulator."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isobit
from isobit import Samples, bits

OF, TOKENS, WIDTH = 8, 3, 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# ranks, micro-batches, wrapper, order of the batch
REDUCERS = {
    "one rank": (1, 4, lambda net: net, "rank"),
    "plain": (2, 2, lambda net: net, "rank"),
    "DDP": (2, 2, DistributedDataParallel, "rank"),
    "FSDP2": (2, 2, fully_shard, "micro"),
}


class Net(nn.Module):
    """Two layers and a norm; `wrong` names what its forward does otherwise."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = isobit.nn.Linear(WIDTH, WIDTH), isobit.nn.Linear(WIDTH, WIDTH)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.to(dtype)

    def forward(self, x, samples, wrong=None):
        rows = x.reshape(-1, WIDTH)
        if wrong == "no samples":
            y = self.first(x).reshape(-1, WIDTH)
        elif wrong == "samples of a whole batch":
            y = self.first(rows, samples=Samples.packed([TOKENS] * len(x)))
        elif wrong == "a stock operator":
            y = F.linear(rows, self.first.weight, self.first.bias)
        elif wrong == "a module called twice":
            y = self.first(self.first(rows, samples=samples), samples=samples)
        elif wrong == "a stock operator beside isobit's":
            y = self.first(rows, samples=samples) + self.first.weight.sum()
        elif wrong == "a norm without samples":
            y = isobit.rms_norm(
                self.first(rows, samples=samples).reshape(x.shape), self.norm
            ).reshape(-1, WIDTH)
        else:
            y = self.first(rows, samples=samples)
        return self.second(isobit.rms_norm(y, self.norm, samples=samples), samples=samples).clone()


def tokens(dtype):
    return torch.randn(OF, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def micro_batch(gradients, net, index, dtype, wrong=None):
    batch = gradients.batch
    with gradients.micro_batch(index) as share:
        samples = Samples.packed([TOKENS] * batch.size, first=share.first, total=share.total)
        x = tokens(dtype)[share.first : share.first + batch.size]
        isobit.exact_sum(net(x, samples, wrong).float().square()).backward()


def read(net):
    grads = {name: p.grad for name, p in net.named_parameters()}
    return bits.digest(
        {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
    )


def held(net):
    """A digest of this rank's parameters."""
    return bits.digest(
        {n: p.to_local() if hasattr(p, "to_local") else p for n, p in net.named_parameters()}
    )


def alone(dtype):
    net = Net(dtype)
    whole = net(tokens(dtype), Samples.packed([TOKENS] * OF))
    isobit.exact_sum(whole.float().square()).backward()
    return read(net)
