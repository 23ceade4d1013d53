"""The definition of isobit.distillation_loss in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.attesting import draw


def divergence(p: Tensor, q: Tensor, direction: str, beta: float) -> Tensor:
    """Return the divergence [...] of log-probabilities p of the teacher and q of the student, both [..., V]."""
    if direction == "forward":
        return (p.exp() * (p - q)).sum(-1)
    if direction == "reverse":
        return (q.exp() * (q - p)).sum(-1)
    m = torch.log(beta * p.exp() + (1 - beta) * q.exp())
    return (beta * p.exp() * (p - m) + (1 - beta) * q.exp() * (q - m)).sum(-1)


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: Any,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    alpha: float = 0.5,
    direction: str = "forward",
    beta: float = 0.5,
) -> Tensor:
    """Return the mean over targets that are not −100 of alpha · T² · KL + (1 − alpha) · cross-entropy."""
    logits = hidden.double() @ weight.double().T
    known = isinstance(teacher, Tensor)
    others = teacher.double() if known else teacher[0].double() @ teacher[1].double().T
    p, q = (x.div(temperature).log_softmax(-1) for x in (others.detach(), logits))
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    found = alpha * temperature**2 * divergence(p, q, direction, beta) - (1 - alpha) * chosen
    return found[targets >= 0].mean()


def example_distillation_loss(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, with x [6, 48] as hidden states of a vocabulary of nine."""
    targets = torch.tensor([0, 3, -100, 8, 1, 1], device=torch.device("cpu"))
    weight, large = (draw(9, width, dtype=x.dtype, seed=width) for width in (48, 32))
    teacher = draw(6, 32, dtype=x.dtype, seed=3), large
    return {
        "hidden": x,
        "weight": weight,
        "teacher": teacher,
        "targets": targets,
        "temperature": 2.0,
    }
