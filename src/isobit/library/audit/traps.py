"""Models that depend on the batch without a call to name: no audit may call them invariant.

Rows are moved between samples, or Python decides by the batch, or results leave torch and come back. An audit may name
an operator, or say that the substituted run is not the variant; it may not be silent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from isobit.library.audit.plants.plant import Dense

Call = Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]


def rolled(x: Tensor) -> Tensor:
    """Add the sample before."""
    return x + x.roll(1, 0)


def swapped(x: Tensor) -> Tensor:
    """Return samples in the opposite order."""
    return x.flip(0)


def branched(x: Tensor) -> Tensor:
    """Scale by another factor where there are other samples."""
    return x * 1.5 if len(x) > 1 else x * 1.25


def by_a_number(x: Tensor) -> Tensor:
    """Scale by a number of Python that was read from all samples."""
    return x * float(x.abs().max())


def through_numpy(x: Tensor) -> Tensor:
    """Sort all samples together outside torch."""
    values = x.detach().cpu().numpy().copy()
    values.sort(axis=0)
    return torch.from_numpy(values).to(x.device)


def counted(x: Tensor) -> Tensor:
    """Scale by the number of samples."""
    return x * torch.full((), 1.0 / len(x), device=x.device)


def beside_rolled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a result that is right, and beside it one that mixes samples."""
    return x, x + x.roll(1, 0)


def beside_choices(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a result that is right, and beside it whole numbers that depend on all samples."""
    return x, (x > x.abs().mean()).long()


class Trap(nn.Module):
    """A clean layer, a function that depends on the batch, and a clean layer."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.first, self.last, self.call = Dense(seed=70), Dense(seed=71), call
        self.eval()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        found = self.call(self.first(x))
        main, beside = found if isinstance(found, tuple) else (found, None)
        y: Tensor = self.last(main)
        return y if beside is None else (y, beside)


TRAPS: tuple[Call, ...] = (
    rolled,
    swapped,
    branched,
    by_a_number,
    through_numpy,
    counted,
    beside_rolled,
    beside_choices,
)
