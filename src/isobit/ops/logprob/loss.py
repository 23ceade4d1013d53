"""The loss of a language model from hidden states: an exact sum of log-probabilities, divided by a number of items."""

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
    num_items: float | None = None,
    samples: Samples | Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Cross-entropy of a language model, from hidden states and the weight of its head.

    Computes −Σ log-probability of the targets / num_items without keeping the logits. The sum is exact, so it has no
    order, and the loss does not depend on how the tokens are arranged.

    Args:
        hidden: Shape [..., K], in fp32, bf16 or fp16.
        weight: Shape [V, K], in the dtype of hidden.
        targets: Token ids of shape [...], int64 or int32.
        temperature: Divides the logits; positive.
        ignore_index: The target that means "no target".
        num_items: The number of targets of the *global* batch. By default that of the targets given, which is an error
            while a share of the batch is trained on.
        samples: The rows of each sample; see isobit.linear_logprob.
        softcap: A soft cap of the logits; see isobit.linear_logprob.

    Returns:
        A scalar in fp32.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together, or there is no target.
        UnsupportedError: If num_items is missing inside isobit.parallel.Gradients.micro_batch.

    Example:
        >>> hidden, weight = torch.randn(4, 16), torch.randn(50, 16)
        >>> targets = torch.tensor([3, 49, -100, 0])
        >>> whole = isobit.linear_cross_entropy(hidden, weight, targets)
        >>> torch.equal(whole, isobit.linear_cross_entropy(hidden.flip(0), weight, targets.flip(0)))
        True
    """
    chosen, active = count_active(targets, ignore_index, num_items)
    asked = {"temperature": temperature, "samples": samples, "softcap": softcap}
    found = linear_logprob(hidden, weight, chosen, **asked)  # type: ignore[arg-type]
    return exact_sum(found) / divisor(-active, found)


def divisor(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor to divide by: a GPU multiplies by the reciprocal of a number, which rounds twice."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def refuse_mean_of_share() -> None:
    """Raise inside a share: divided by its own count, the sum over shares would depend on how the batch is cut."""
    share = share_in_force()
    if share is not None and share.size < share.total and torch.is_grad_enabled():
        raise UnsupportedError(
            expected="the number of targets of the global batch, inside Gradients.micro_batch",
            received=f"none: a mean over the {share.size} of {share.total} samples of this share",
            remedy="pass the number of targets of all shares as num_items_in_batch= to the model, or as num_items= to "
            "the loss; run what is not trained under torch.no_grad()",
        )


def count_active(
    targets: Tensor, ignore_index: int, num_items: float | None
) -> tuple[Tensor, float]:
    """Return the targets with −100 for none, and the number by which the sum is divided."""
    if num_items is None:
        refuse_mean_of_share()
    chosen = (
        targets
        if ignore_index == IGNORED
        else targets.masked_fill(targets == ignore_index, IGNORED)
    )
    active = int((chosen != IGNORED).sum()) if num_items is None else num_items
    if not active > 0:
        raise ArgumentError(
            expected="num_items of 1 or more",
            received=f"{active} targets",
            remedy=f"leave out batches whose targets are all {ignore_index}",
        )
    return chosen, active
