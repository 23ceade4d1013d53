"""The loss of a language model from hidden states: an exact sum of log-probabilities, divided by a count."""

from __future__ import annotations

from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.logprob.op import IGNORED, linear_logprob
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

    `count` is the number of targets of the *global* batch; by default that of the targets given. The sum is exact: it
    has no order.
    """
    chosen, active = count_active(targets, ignore_index, count)
    found = linear_logprob(hidden, weight, chosen, temperature=temperature, samples=samples)
    return exact_sum(found) / -active


def count_active(targets: Tensor, ignore_index: int, count: float | None) -> tuple[Tensor, float]:
    """The targets with −100 for none, and how many of the global batch the sum is divided by."""
    chosen = targets if ignore_index == IGNORED else targets.masked_fill(targets == ignore_index, IGNORED)
    active = int((chosen != IGNORED).sum()) if count is None else count
    if not active > 0:
        raise ArgumentError(
            expected="a count of one target or more",
            received=f"{active} targets",
            remedy=f"leave out batches whose targets are all {ignore_index}",
        )
    return chosen, active
