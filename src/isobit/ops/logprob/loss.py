"""The loss of a language model from hidden states: an exact sum of log-probabilities, divided by a count."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.ops.share import share_in_force
from isobit.order.samples import Samples


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = IGNORED,
    count: float | None = None,
    samples: Samples | None = None,
) -> Tensor:
    """−Σ log-probability of the targets / count, in fp32, without ever holding the logits.

    `count` is the number of targets of the *global* batch; by default that of the targets given, which is refused where
    a share of the batch is trained on. The sum is exact: it has no order.
    """
    chosen, active = count_active(targets, ignore_index, count)
    found = linear_logprob(hidden, weight, chosen, temperature=temperature, samples=samples)
    return exact_sum(found) / -active


def refuse_mean_of_share() -> None:
    """Each share would be divided by its own count, so the sum over shares would depend on how the batch is cut."""
    share = share_in_force()
    if share is not None and share.size < share.of and torch.is_grad_enabled():
        raise UnsupportedError(
            expected="the number of targets of the global batch, inside Gradients.micro_batch",
            received=f"none: a mean over the {share.size} of {share.of} samples of this share",
            remedy="pass num_items_in_batch= to the model, or count= to the loss: that of all shares; what is not "
            "trained runs under torch.no_grad()",
        )


def count_active(targets: Tensor, ignore_index: int, count: float | None) -> tuple[Tensor, float]:
    """The targets with −100 for none, and how many of the global batch the sum is divided by."""
    if count is None:
        refuse_mean_of_share()
    chosen = (
        targets
        if ignore_index == IGNORED
        else targets.masked_fill(targets == ignore_index, IGNORED)
    )
    active = int((chosen != IGNORED).sum()) if count is None else count
    if not active > 0:
        raise ArgumentError(
            expected="a count of one target or more",
            received=f"{active} targets",
            remedy=f"leave out batches whose targets are all {ignore_index}",
        )
    return chosen, active
