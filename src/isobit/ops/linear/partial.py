"""Partial sums of a linear layer that is cut over ranks or micro-batches, and `merge`, which completes them.

A *share* is what one rank or micro-batch owns; see [Note: shares of a global batch] in isobit/order/samples.py. No
function here has a gradient: the caller, such as isobit.parallel.tensor, owns the exchange between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import CutError
from isobit.foundation.machine import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.linear.group import check_groups, interleave
from isobit.ops.portable.samples import check_rows, spans_of
from isobit.ops.portable.sums import round_once, sum_products, sum_rows, widen_rows
from isobit.order.cut import Cut
from isobit.order.plan import SAMPLE_CAP, SAMPLE_UNIT, FeaturePlan, count_segments
from isobit.order.samples import Samples, segment_size
from isobit.order.tree import Counter, Node


@dataclass(frozen=True)
class Partial:
    """Subtrees of a sum: `values[i]`, not rounded, is node `nodes[i]` of a tree of `segments` segments."""

    nodes: tuple[Node, ...]
    values: Tensor
    segments: int


def output(x: Tensor, weight: Tensor, cut: Cut) -> Partial:
    """Return a K-share of y from x [..., K/parts] and weight [N, K/parts]. Pass the bias to `merge`."""
    check_tensors(x=x, weight=weight)
    check_share("x", x, cut)
    check_share("weight", weight, cut)
    if dispatch.is_native(x.dtype):
        values = torch.ops.isobit.linear_roots(x, weight, cut.extent, cut.start)
    else:
        values = _portable(cut, widen_rows(x), widen_rows(weight))
        values = values.reshape(-1, *x.shape[:-1], weight.shape[0])
    return Partial(cut.roots, values, FeaturePlan(cut.extent).count)


def input_grad(grad: Tensor, weight: Tensor, cut: Cut) -> Partial:
    """Return an N-share of dX from grad [..., N/parts] and weight [N/parts, K]."""
    check_tensors(grad=grad, weight=weight)
    check_share("grad", grad, cut)
    check_share("weight.t()", weight.t(), cut)
    if dispatch.is_native(grad.dtype):
        values = torch.ops.isobit.linear_input_grad_roots(grad, weight, cut.extent, cut.start)
    else:
        values = _portable(cut, widen_rows(grad), widen_rows(weight).t())
        values = values.reshape(-1, *grad.shape[:-1], weight.shape[1])
    return Partial(cut.roots, values, FeaturePlan(cut.extent).count)


def group_input_grad(
    grads: Sequence[Tensor], weights: Sequence[Tensor], groups: int, cut: Cut
) -> Partial:
    """Return a share of linear_group's dX: `groups` whole groups of grads [..., N_i/parts], weights [N_i/parts, K]."""
    for grad, weight in zip(grads, weights, strict=True):
        check_tensors(grad=grad, weight=weight)
        check_groups(weight, groups)
        if grad.shape[:-1] != grads[0].shape[:-1] or grad.shape[-1] != weight.shape[0]:
            refuse_shape(
                "grad",
                grad,
                f"{[*grads[0].shape[:-1], weight.shape[0]]}",
                "pass each weight's own gradient",
            )
    rows = sum(weight.shape[0] for weight in weights)
    if rows != cut.length:
        raise CutError(
            expected=f"{cut.length} rows of weights, one of {cut.parts} shares of {cut.extent}",
            received=f"{rows}",
            remedy="take whole groups of every weight, as many on each rank",
        )
    if dispatch.is_native(grads[0].dtype):
        values = torch.ops.isobit.linear_group_input_grad_roots(
            list(grads), list(weights), groups, cut.extent, cut.start
        )
        return Partial(cut.roots, values, FeaturePlan(cut.extent).count)
    return input_grad(interleave(grads, -1, groups), interleave(weights, 0, groups), cut)


def weight_grad(grad: Tensor, x: Tensor, samples: Samples) -> Partial:
    """Return a share of dW over the samples described, from grad [..., N] and x [..., K]."""
    check_tensors(grad=grad, x=x)
    spans = spans_of(samples, grad)
    check_rows(samples, x)
    if dispatch.is_native(x.dtype):
        values = torch.ops.isobit.linear_weight_grad_roots(
            grad, x, spans, samples.first, samples.total
        )
    else:
        left, right = widen_rows(grad).t(), widen_rows(x).t()
        values = keeping_subnormals(sum_products)(
            samples.segments, left, right, _first_segment(samples)
        )
    return Partial(samples.roots, values, _sample_segments(samples))


def bias_grad(grad: Tensor, samples: Samples) -> Partial:
    """Return a share of db over the samples described, from grad [..., N]."""
    check_tensors(grad=grad)
    spans = spans_of(samples, grad)
    if dispatch.is_native(grad.dtype):
        values = torch.ops.isobit.linear_bias_grad_roots(grad, spans, samples.first, samples.total)
    else:
        first = _first_segment(samples)
        values = keeping_subnormals(sum_rows)(samples.segments, widen_rows(grad), first)
    return Partial(samples.roots, values, _sample_segments(samples))


@keeping_subnormals
def merge(partials: Iterable[Partial], *, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Merge all shares of one sum by the tree, add the bias, and round once to `dtype`.

    Raises:
        CutError: If the shares are not every segment of one sum exactly once.
    """
    shares = list(partials)
    pieces = [
        (node, value)
        for share in shares
        for node, value in zip(share.nodes, share.values.unbind(0), strict=True)
    ]
    counter: Counter[Tensor] = Counter(torch.add)
    for node, value in sorted(pieces, key=lambda piece: piece[0].first):
        counter.push(node, value)
    held = [(node.first, node.stop) for node, _ in counter]
    segments = {share.segments for share in shares}
    if len(segments) != 1 or held != [(0, *segments)]:
        raise CutError(
            expected="every segment of one sum exactly once",
            received=f"segments {held} of {sorted(segments)}",
            remedy="merge all shares of one cut, each once",
        )
    total = counter[0][1]
    if bias is not None:
        total = total + bias.to(total.dtype)
    return round_once(total, dtype)


def check_share(name: str, tensor: Tensor, cut: Cut) -> None:
    """Raise unless the last axis is as long as the share."""
    if tensor.shape[-1] != cut.length:
        expected = f"[..., {cut.length}], one of {cut.parts} shares of {cut.extent}"
        refuse_shape(
            name, tensor, expected, "slice the summed axis from cut.start to cut.start + cut.length"
        )


def _portable(cut: Cut, left: Tensor, right: Tensor) -> Tensor:
    share = FeaturePlan(cut.extent).count // cut.parts
    # Positions are counted from the share's start.
    segments = FeaturePlan(cut.extent).products[:share]
    return keeping_subnormals(sum_products)(segments, left, right, cut.index * share)


def _first_segment(samples: Samples) -> int:
    return samples.first // segment_size(samples.total)


def _sample_segments(samples: Samples) -> int:
    return count_segments(samples.total, SAMPLE_UNIT, SAMPLE_CAP)
