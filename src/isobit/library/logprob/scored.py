"""Log-probabilities as the contracts draw them, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case
from isobit.library import gradients as autograd
from isobit.ops.logprob.op import IGNORED, linear_logprob

Score = Callable[..., Tensor]  # (hidden, weight, targets, **options) -> a number per row, or a loss


@dataclass(frozen=True)
class Scored:
    """A subject whose targets are chosen by the bits of the hidden states."""

    score: Score

    def __call__(self, hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Score each row at the target that its bits choose."""
        return self.score(hidden, weight, targets_of(hidden, len(weight)), **options)


def targets_of(hidden: Tensor, vocabulary: int) -> Tensor:
    """Return an id per row, a function of that row's bits alone; about one in 17 is ignored."""
    raw = bits.as_integers(hidden[..., 0].detach().float()).long().abs() // 3
    return torch.where(raw % 17 == 0, IGNORED, raw % vocabulary)


def drawn_targets(case: Case, count: int, stream: int) -> Tensor:
    """Return random ids; about one in ten is ignored."""
    ids = torch.randint(0, case.sizes["v"], (count,), generator=case.generator(stream))
    return torch.where(torch.rand(count, generator=case.generator(stream + 1)) < 0.1, IGNORED, ids)


def gradients(
    score: Score, hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return dhidden and dweight by autograd."""
    found = autograd.gradients(
        lambda hidden, weight: score(hidden, weight, targets, **options), (hidden, weight), grad
    )
    return found[0], found[1]


ours = Scored(linear_logprob)
