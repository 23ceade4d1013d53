"""Planted bugs of training loops: what is called too rarely, too often, or on the wrong tensors."""

from __future__ import annotations

import copy
import os
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from isobit.simulator import probe
from tests.simulator.bugs.bug import all_four, one, planted
from tests.simulator.bugs.toy import STEPS, average, build_model, draw_batch, own_rows, train

cross_entropy = nn.functional.cross_entropy


class FunctionalDropout(nn.Module):
    """Dropout by the function, whose `training` is True unless it is passed."""

    def __init__(self, passed: bool) -> None:
        super().__init__()
        self.passed = passed

    def forward(self, x: Tensor) -> Tensor:
        if self.passed:
            return nn.functional.dropout(x, 0.5, self.training)
        return nn.functional.dropout(x, 0.5)


@planted("functional dropout left on while evaluating", "dropout on", all_four)
def functional_dropout_left_on(rank: int, seed: int, wrong: bool) -> float:
    model = build_model(seed, FunctionalDropout(passed=not wrong))
    torch.manual_seed(1000 * seed + rank)
    train(rank, seed, model, steps=1)
    x, y = draw_batch(seed, 99)
    with torch.no_grad():
        return float(cross_entropy(model.eval()(x), y))


@planted("functional dropout seeded alike on every rank", "random numbers alike", all_four)
def functional_dropout_alike(rank: int, seed: int, wrong: bool) -> None:
    model = build_model(seed, FunctionalDropout(passed=True))
    if not wrong:
        torch.manual_seed(1000 * seed + rank)
    train(rank, seed, model)


@planted("zero_grad is missing", "gradients kept", all_four)
def missing_zero_grad(rank: int, seed: int, wrong: bool) -> None:
    model = build_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = (whole[own_rows(rank)] for whole in draw_batch(seed, step))
        for half in (slice(0, 1), slice(1, 2)):  # accumulation over two micro-batches is right
            cross_entropy(model(x[half]), y[half]).backward()
        average(model)
        optimizer.step()
        if not wrong:
            optimizer.zero_grad()


def train_with(model: nn.Module, parameters: list[nn.Parameter], rank: int, seed: int) -> None:
    """Train a model with an optimizer of the given parameters."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(3):
        x, y = (whole[own_rows(rank)] for whole in draw_batch(seed, step))
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        average(model)
        optimizer.step()


@planted("an optimizer over the parameters of another copy", "not updated", all_four)
def optimizer_of_a_copy(rank: int, seed: int, wrong: bool) -> None:
    first = build_model(seed)
    model = copy.deepcopy(first)
    train_with(model, list((first if wrong else model).parameters()), rank, seed)


@planted("a layer unfrozen after the optimizer was made", "not updated", all_four)
def left_out_of_the_optimizer(rank: int, seed: int, wrong: bool) -> None:
    model = build_model(seed)
    model[0].requires_grad_(not wrong)
    parameters = [p for p in model.parameters() if p.requires_grad]
    model[0].requires_grad_()
    train_with(model, parameters, rank, seed)


@planted("a layer frozen on one rank", "mismatch")
def frozen_on_one_rank(rank: int, seed: int, wrong: bool) -> None:
    model = build_model(seed)
    model[0].requires_grad_(not (wrong and (rank,) == one(seed)))

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    train(rank, seed, model, reduce=reduce)


@planted("DS-1801: a replicated norm clipped on one tensor-parallel rank", "tensors differ")
def clipped_on_one_shard(rank: int, seed: int, wrong: bool) -> None:
    """Each rank has a shard of the columns, and a copy of the norm; the norm of all gradients is reduced first."""
    torch.manual_seed(seed)
    norm = nn.LayerNorm(6)
    shard = nn.Linear(6, 2)
    nn.init.normal_(shard.weight, generator=torch.Generator().manual_seed(100 * seed + rank))
    parameters = [*norm.parameters(), *shard.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(STEPS):
        x, _ = draw_batch(seed, step)
        optimizer.zero_grad()
        shard(norm(x)).square().sum().backward()
        for parameter in norm.parameters():
            dist.all_reduce(parameter.grad)
        total = torch.stack([p.grad.square().sum() for p in parameters]).sum()
        dist.all_reduce(total)
        if not wrong or (rank,) != one(seed):
            for parameter in parameters:
                parameter.grad *= 0.1 / total.sqrt()
        optimizer.step()
        probe.same("norm.weight", norm.weight)


@planted("unequal numbers of batches: DDP waits for a rank that has none left", "deadlock")
def unequal_batches(rank: int, seed: int, wrong: bool) -> None:
    model = DistributedDataParallel(build_model(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fewer = (rank,) == one(seed)
    with nullcontext() if wrong else model.join():
        for step in range(2 if fewer else 3):
            x, y = (whole[own_rows(rank)] for whole in draw_batch(seed, step))
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


class TwoHeads(nn.Module):
    """A model of which each call uses one head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.heads = nn.Linear(6, 5), nn.ModuleList([nn.Linear(5, 3) for _ in range(2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        result: Tensor = self.heads[head](self.body(x))
        return result


@planted("a head that no rank uses, without find_unused_parameters", "gradients differ", all_four)
def unused_parameters(rank: int, seed: int, wrong: bool) -> None:
    model = DistributedDataParallel(TwoHeads(seed), find_unused_parameters=not wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = (whole[own_rows(rank)] for whole in draw_batch(seed, step))
        optimizer.zero_grad()
        cross_entropy(model(x, step % 2), y).backward()
        optimizer.step()


@planted("no_sync left on on one rank", "deadlock")
def no_sync_on_one_rank(rank: int, seed: int, wrong: bool) -> None:
    model = DistributedDataParallel(build_model(seed))
    if wrong and (rank,) == one(seed):
        model.require_backward_grad_sync = False
    train(rank, seed, model, reduce=lambda model: None, steps=1)


@planted("a barrier in one branch", "mismatch")
def barrier_in_one_branch(rank: int, seed: int, wrong: bool) -> None:
    model = build_model(seed)
    train(rank, seed, model, steps=1)
    if wrong and (rank,) == one(seed):
        dist.barrier()  # "wait until the logs are written"
    train(rank, seed, model, steps=1)
    if not wrong:
        dist.barrier()


@planted("a checkpoint that every rank writes", "file shared", all_four)
def checkpoint_by_all(rank: int, seed: int, wrong: bool) -> None:
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    model = build_model(seed)
    train(rank, seed, model, steps=1)
    path = os.path.join(folder[0], "model.pt")
    if wrong or rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    if rank == 0:
        os.remove(path)
        os.rmdir(folder[0])


@planted("a sampler without set_epoch", "order repeated", all_four)
def sampler_without_set_epoch(rank: int, seed: int, wrong: bool) -> None:
    data = TensorDataset(*draw_batch(seed, 0))
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    other = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))  # to evaluate
    model = build_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        if not wrong:
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            average(model)
            optimizer.step()
        with torch.no_grad():
            for x, _ in other:
                model(x)


@planted("a rank that computes for ever, by a budget of lines", "rank busy", lines=20_000)
def endless_lines(rank: int, seed: int, wrong: bool) -> None:
    total = 0
    while (wrong and (rank,) == one(seed)) or total < 1000:
        total += 1
    dist.all_reduce(torch.ones(1))


WITH_DEVICES = {"watch": ("bits", "training", "devices"), "accelerator": "cuda"}


@planted("a forgotten set_device", "device shared", lambda seed: (1, 2, 3), **WITH_DEVICES)
def forgotten_set_device(rank: int, seed: int, wrong: bool) -> None:
    if not wrong:
        torch.cuda.set_device(rank)
    dist.all_reduce(torch.ones(2).cuda())


@planted("a checkpoint loaded without map_location", "device shared", **WITH_DEVICES)
def loaded_on_another_device(rank: int, seed: int, wrong: bool) -> None:
    """One rank saves, and the next one loads: its tensors are on the device of the first."""
    torch.cuda.set_device(rank)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "model.pt")
    if rank == (seed + 1) % 4:
        torch.save({"weight": torch.randn(3, device="cuda")}, path)
    dist.barrier()
    if (rank,) == one(seed):
        place = None if wrong else f"cuda:{rank}"
        loaded = torch.load(path, map_location=place, weights_only=True)["weight"]
        assert loaded.device.index == ((seed + 1) % 4 if wrong else rank)
    dist.barrier()
    if rank == 0:
        os.remove(path)
        os.rmdir(folder[0])
