"""Correct training programs: what a guard must be silent about.

A program counts once for code of its own: another model class, loss, or loop. The same code with another optimizer,
rate or size is the same program.
"""

import torch
from torch.nn import functional as F

ALONE = {}  # programs for one rank, run by preflight
NEEDS = {}  # packages by program
TOGETHER = {}  # programs for simulated ranks, which return the findings of their watch


def right(program=None, *, needs=None):
    """Add a program; `needs` is a package that the development tools do not install."""
    if program is None:
        return lambda program: right(program, needs=needs)
    assert program.__name__ not in ALONE
    ALONE[program.__name__] = program
    if needs is not None:
        NEEDS[program.__name__] = needs
    return program


def on_ranks(program):
    assert program.__name__ not in TOGETHER
    TOGETHER[program.__name__] = program
    return program


def rand(step, *shape):
    """Numbers of a step, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def ids(step, *shape, below=16):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(step))


def fit(model, loss, *, optimizer=None, steps=4, after=None):
    """The plain loop: `loss(step)` is minimised."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        if after is not None:
            after(step)


def classify(model, *shape, classes=4, **options):
    """Cross entropy on random inputs of this shape."""
    fit(
        model,
        lambda step: F.cross_entropy(model(rand(step, *shape)), ids(step, shape[0], below=classes)),
        **options,
    )
