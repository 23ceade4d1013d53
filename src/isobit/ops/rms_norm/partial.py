"""Shares of a norm over heads: each rank sums its own heads sample by sample; merged, they are the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import CutError
from isobit.isolation import keeping_subnormals
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
    """(dx, each sample's total [samples, n] of dweight over these heads, unrounded), as isobit.rms_norm(heads=True).

    x is [..., T, H, n], heads `first_head` and on of `heads_total`, one subtree of them. The totals of all ranks,
    merged by the balanced tree in the order of their heads, then by `merge_samples`, are the gradient of the whole.
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
    """Compute `sample_grads` in stock operations."""
    dx, terms = portable.input_grad_and_terms(grad, x, weight, scales)
    return dx, portable.sum_heads(terms, samples, x.shape[-2], heads_total)


def merge_samples(totals: Tensor, of: int) -> Tensor:
    """[n], unrounded, of the samples' totals [samples, n] over all heads; they are one subtree of `of` samples."""
    if totals.dim() != 2:
        refuse_shape(
            "totals", totals, "[samples, n]", "pass what sample_grads gave, merged over the ranks"
        )
    find_subtree("samples", 0, len(totals), of, SAMPLE_CAP)
    if dispatch.is_native(totals.dtype):
        return torch.ops.isobit.rms_norm_merge_samples(totals, of)  # type: ignore[no-any-return]
    return keeping_subnormals(portable.merge_samples)(totals, of)


def find_subtree(what: str, first: int, count: int, of: int, cap: int) -> Node:
    """The one node of the tree over `of` items that `count` of them from `first` on are, or a refusal."""
    size = max(of // count_segments(of, 1, cap), 1)
    aligned = first >= 0 and first + count <= of and first % size == 0 and count % size == 0
    roots = find_roots(first // size, (first + count) // size) if aligned else ()
    if len(roots) != 1:
        raise CutError(
            expected=f"{what} that are one subtree of {of}, whose segments hold {size}",
            received=f"{what} {first} to {first + count}",
            remedy=f"take a power of two times {size}, from a multiple of it",
        )
    return roots[0]
