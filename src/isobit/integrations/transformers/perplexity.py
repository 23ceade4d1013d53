"""The perplexity of a model by an exact sum: one number for every batch size and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from isobit.integrations.transformers.scoring import logprobs
from isobit.parallel.collectives.levels import Group
from isobit.parallel.data.loss_meter import LossMeter

IGNORED = -100


@torch.no_grad()
def perplexity(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, group: Group = None
) -> float:
    """Return exp(−Σ log p / count) over all tokens that follow another one (FALSIFY-ALBOR-009).

    A token's log-probability does not depend on its batch, and the sum is exact, so the result does not depend on how
    samples are ordered, batched, padded or divided over ranks.

    Args:
        model: An enabled causal language model.
        batches: Pairs (input_ids, attention_mask), both [B, T], of whole samples; on each rank its own.
        group: The ranks that have a part of the samples; None is the default group.

    Returns:
        The perplexity, in fp64.

    Raises:
        ArgumentError: There is no token to score.
    """
    meter = LossMeter()
    for ids, mask in batches:
        targets = torch.full_like(ids, IGNORED)
        follows = mask[:, 1:].bool() & mask[:, :-1].bool()
        targets[:, :-1] = torch.where(follows, ids[:, 1:], IGNORED)
        found = logprobs(model, ids, mask, targets=targets)
        meter.add(-found, int(follows.sum()))
    return math.exp(float(meter.value(group)))
