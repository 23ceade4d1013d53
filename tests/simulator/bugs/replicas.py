"""Planted bugs that keep silent: replicas that part, or agree on the wrong numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isobit.simulator import probe
from tests.simulator.bugs.bug import all_four, one, planted
from tests.simulator.bugs.toy import (
    SAMPLES,
    STEPS,
    WIDTH,
    average,
    build_model,
    draw_batch,
    own_rows,
    train,
)

cross_entropy = nn.functional.cross_entropy


@planted("gradients that nobody reduces", "gradients differ", all_four)
def missing_all_reduce(rank: int, seed: int, wrong: bool) -> None:
    def reduce(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if not (wrong and name == "2.bias"):
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    train(rank, seed, build_model(seed), reduce=reduce)


@planted("one rank calls the wrapped module: DDP never sees its gradients", "deadlock")
def wrapper_bypassed_by_one(rank: int, seed: int, wrong: bool) -> None:
    wrapped = DistributedDataParallel(build_model(seed))
    model = wrapped.module if wrong and (rank,) == one(seed) else wrapped
    train(rank, seed, model, reduce=lambda model: None)


@planted(
    "every rank calls the wrapped module: DDP never sees the gradients",
    "gradients differ",
    all_four,
)
def wrapper_bypassed(rank: int, seed: int, wrong: bool) -> None:
    wrapped = DistributedDataParallel(build_model(seed))
    train(rank, seed, wrapped.module if wrong else wrapped, reduce=lambda model: None)


@planted("no_sync around the last micro-batch too", "gradients differ", all_four)
def no_sync_to_the_end(rank: int, seed: int, wrong: bool) -> None:
    model = DistributedDataParallel(build_model(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (whole[own_rows(rank)] for whole in draw_batch(seed, 0))
    with model.no_sync():
        cross_entropy(model(x[:1]), y[:1]).backward()
        if wrong:
            cross_entropy(model(x[1:]), y[1:]).backward()
    if not wrong:
        cross_entropy(model(x[1:]), y[1:]).backward()
    optimizer.step()


@planted("weights drawn from another seed on one rank, never broadcast", "start differs")
def unequal_start(rank: int, seed: int, wrong: bool) -> None:
    model = build_model(seed + 1 if (rank,) == one(seed) else seed)
    if not wrong:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
    train(rank, seed, model)


@planted("a learning rate scaled on one rank", "update differs")
def unequal_rate(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed), rate=0.1 * (4 if wrong and (rank,) == one(seed) else 1))


class RunningMean(nn.Module):
    """Keeps a running mean of what passes; right only if the mean is taken over all ranks."""

    def __init__(self, synchronised: bool) -> None:
        super().__init__()
        self.synchronised = synchronised
        self.register_buffer("mean", torch.zeros(5))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen = x.detach().mean(0)
            if self.synchronised:
                dist.all_reduce(seen, dist.ReduceOp.AVG)
            self.mean.lerp_(seen, 0.1)
        return x - self.mean


@planted("a running mean of each rank's own batch", "buffers differ", all_four)
def unsynchronised_buffer(rank: int, seed: int, wrong: bool) -> float:
    model = build_model(seed, RunningMean(synchronised=not wrong))
    train(rank, seed, model, steps=1)
    x, y = draw_batch(seed, 99)
    with torch.no_grad():
        return float(cross_entropy(model.eval()(x), y))


@planted("dropout masks alike on every rank", "random numbers alike", all_four)
def dropout_seeded_alike(rank: int, seed: int, wrong: bool) -> None:
    model = build_model(seed, nn.Dropout(0.5))
    if not wrong:
        torch.manual_seed(1000 * seed + rank)
    train(rank, seed, model)


@planted(
    "two ranks train on the same samples",
    "data alike",
    lambda seed: tuple(sorted((seed % 4, (seed + 1) % 4))),
)
def duplicated_samples(rank: int, seed: int, wrong: bool) -> None:
    def rows(rank: int, step: int) -> slice:
        return own_rows((rank + 1) % 4 if wrong and rank == seed % 4 else rank)

    train(rank, seed, build_model(seed), rows=rows)


def unequal_rows(rank: int, step: int) -> slice:
    """Shares of 1, 2, 2 and 3 samples: as unequal as lengths of text are."""
    ranks = dist.get_world_size()
    edges = {1: (0, 8), 4: (0, 1, 3, 5, 8)}[ranks]
    return slice(edges[rank], edges[rank + 1])


@planted(
    "a mean of means over unequal shares", "weights differ", lambda seed: (0, 3), against_one=True
)
def mean_of_means(rank: int, seed: int, wrong: bool) -> None:
    """Ranks 1 and 2 hold a quarter of the samples, so a quarter is their right weight."""

    def reduce(model: nn.Module) -> None:
        rows = unequal_rows(rank, 0)
        weight = 1 / dist.get_world_size() if wrong else (rows.stop - rows.start) / SAMPLES
        for parameter in model.parameters():
            parameter.grad *= weight
            dist.all_reduce(parameter.grad)

    train(rank, seed, build_model(seed), reduce=reduce, rows=unequal_rows)


@planted("gradients summed over the ranks twice", "weights differ", all_four, against_one=True)
def reduced_twice(rank: int, seed: int, wrong: bool) -> None:
    def reduce(model: nn.Module) -> None:
        if wrong:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        average(model)

    train(rank, seed, build_model(seed), reduce=reduce)


@planted("gradients clipped by each rank's own norm", "weights differ", all_four, against_one=True)
def clipped_by_own_norm(rank: int, seed: int, wrong: bool) -> None:
    def reduce(model: nn.Module) -> None:
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        average(model)
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    train(rank, seed, build_model(seed), reduce=reduce)


@planted(
    "a sharded gradient applied to another rank's shard",
    "differs from one worker",
    against_one=True,
)
def wrong_shard(rank: int, seed: int, wrong: bool) -> None:
    """Each rank updates its quarter of the weights, then all gather them."""
    ranks = dist.get_world_size()
    torch.manual_seed(seed)
    weight = torch.randn(2 * WIDTH, requires_grad=True)
    for step in range(STEPS):
        x, y = (whole[own_rows(rank)] for whole in draw_batch(seed, step))
        loss = cross_entropy(x @ weight.view(WIDTH, 2), y % 2)
        (gradient,) = torch.autograd.grad(loss, weight)
        shard = torch.empty(weight.numel() // ranks)
        dist.reduce_scatter_tensor(shard, gradient, dist.ReduceOp.AVG)
        at = (rank + (wrong and (rank,) == one(seed))) % ranks
        old = weight.detach().chunk(ranks)[at]
        dist.all_gather_into_tensor(weight.detach(), old - 0.1 * shard)
        probe.same("weight", weight)


@planted("a rank without active tokens: the mean of nothing", "not finite")
def empty_share(rank: int, seed: int, wrong: bool) -> None:
    model = build_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = (whole[own_rows(rank)] for whole in draw_batch(seed, step))
        active = torch.ones(len(y))
        if (rank,) == one(seed) and step == 1:
            active.zero_()
        optimizer.zero_grad()
        losses = cross_entropy(model(x), y, reduction="none") * active
        (losses.sum() / (active.sum() if wrong else active.sum().clamp(min=1))).backward()
        average(model)
        optimizer.step()
