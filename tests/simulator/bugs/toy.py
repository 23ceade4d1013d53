"""The tiny model, batch and training loop that planted bugs share: plain torch.distributed, nothing of isobit's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 2
SAMPLES, WIDTH, CLASSES = 8, 6, 3


def build_model(seed: int, *extra: nn.Module) -> nn.Sequential:
    """The same weights on every rank, as scripts do it."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), *extra, nn.Linear(5, CLASSES))


def draw_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, the same whatever the number of ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    scale = torch.empty(SAMPLES, WIDTH).uniform_(-3.0, 3.0, generator=generator).exp()
    x = torch.randn(SAMPLES, WIDTH, generator=generator) * scale
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def own_rows(rank: int) -> slice:
    """This rank's equal share of the batch."""
    size = SAMPLES // dist.get_world_size()
    return slice(rank * size, (rank + 1) * size)


def average(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The gradients' mean over the ranks of a group, by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def train(
    rank: int,
    seed: int,
    model: nn.Module,
    *,
    reduce: Callable[[nn.Module], None] = average,
    rows: Callable[[int, int], slice] | None = None,
    rate: float = 0.1,
    steps: int = STEPS,
) -> None:
    """A few steps of data-parallel training; `rows(rank, step)` says which samples are this rank's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for step in range(steps):
        x, y = draw_batch(seed, step)
        mine = own_rows(rank) if rows is None else rows(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        reduce(model)
        optimizer.step()
