"""The definition of isobit.linear_logprob and isobit.linear_cross_entropy in fp64, and arguments to try them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.attesting import draw
from isobit.order.samples import Samples


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    samples: Any = None,
) -> Tensor:
    """Return log_softmax(hidden @ weight.T / temperature) at each target; 0 where the target is −100."""
    logits = hidden.double() @ weight.double().T / temperature
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets < 0, 0.0, chosen)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of −log-probability over the targets that are not −100."""
    return -linear_logprob(hidden, weight, targets).sum() / (targets != -100).sum()


def example_linear_logprob(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, with x [6, 48] as hidden states of a vocabulary of nine."""
    return example_linear_cross_entropy(x) | {"samples": Samples.packed([2, 4])}


def example_linear_cross_entropy(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, with x [6, 48] as hidden states of a vocabulary of nine."""
    targets = torch.tensor([0, 3, -100, 8, 1, 1], device=torch.device("cpu"))
    return {"hidden": x, "weight": draw(9, 48, dtype=x.dtype, seed=1), "targets": targets}
