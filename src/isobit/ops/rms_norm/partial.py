"""The gradient of RMSNorm over heads that are cut over ranks: sums per sample, and the function that merges them."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import CutError
from isobit.foundation.machine import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.portable.norms import check_norm
from isobit.ops.portable.samples import spans_of
from isobit.ops.rms_norm import portable
from isobit.order.plan import FEATURE_CAP, SAMPLE_CAP, count_segments
from isobit.order.samples import Samples
from isobit.order.tree import Node, find_roots


def sample_grads(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    samples: Samples,
    *,
    heads_total: int,
    first_head: int,
) -> tuple[Tensor, Tensor]:
    """Return dx, and the sums [samples, n] of dweight over this rank's heads, per sample and not rounded.

    x is [..., T, H, n]: H heads from `first_head` on, which must be one subtree of `heads_total` heads. The sums of all
    ranks, merged by the tree in the order of heads and then by `merge_samples`, are the gradient of the whole weight.
    """
    check_tensors(grad=grad, x=x, weight=weight)
    check_norm(x, weight, 0.0, 2)
    if grad.shape != x.shape:
        refuse_shape("grad", grad, f"{list(x.shape)}", "pass the gradient of the norm of x")
    find_subtree("heads", first_head, x.shape[-2], heads_total, FEATURE_CAP)
    spans = spans_of(samples, x.select(-2, 0))
    if dispatch.is_native(x.dtype):
        grads = torch.ops.isobit.rms_norm_sample_grads
        return grads(grad, x, weight, scales.contiguous(), spans, heads_total)  # type: ignore[no-any-return]
    return portable_sample_grads(grad, x, weight, scales, samples, heads_total)


@keeping_subnormals
def portable_sample_grads(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, samples: Samples, heads_total: int
) -> tuple[Tensor, Tensor]:
    """Compute `sample_grads` with the portable executor."""
    dx, terms = portable.input_grad_and_terms(grad, x, weight, scales)
    return dx, portable.sum_heads(terms, samples, x.shape[-2], heads_total)


def merge_samples(totals: Tensor, of: int) -> Tensor:
    """Return [n], not rounded: the sum of totals [samples, n], which are one subtree of `of` samples."""
    if totals.dim() != 2:
        refuse_shape(
            "totals",
            totals,
            "[samples, n]",
            "pass what sample_grads returned, merged over the ranks",
        )
    find_subtree("samples", 0, len(totals), of, SAMPLE_CAP)
    if dispatch.is_native(totals.dtype):
        return torch.ops.isobit.rms_norm_merge_samples(totals, of)  # type: ignore[no-any-return]
    return keeping_subnormals(portable.merge_samples)(totals, of)


def find_subtree(what: str, first: int, count: int, of: int, cap: int) -> Node:
    """Return the node of the tree over `of` items that consists of `count` items from `first` on.

    Raises:
        CutError: If there is no such node.
    """
    size = max(of // count_segments(of, 1, cap), 1)
    aligned = first >= 0 and first + count <= of and first % size == 0 and count % size == 0
    roots = find_roots(first // size, (first + count) // size) if aligned else ()
    if len(roots) != 1:
        raise CutError(
            expected=f"{what} that are one subtree of {of}, in segments of {size}",
            received=f"{what} {first} to {first + count}",
            remedy=f"take {size} times a power of two {what}, starting at a multiple of that number",
        )
    return roots[0]
