"""Shares of a larger linear problem: each returns its unmerged subtrees; all of them merged are the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import CutError
from isobit.isolation import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.linear import portable
from isobit.ops.linear.group import check_groups, interleave
from isobit.ops.linear.op import spans_of
from isobit.order.cut import Cut
from isobit.order.plan import SAMPLE_CAP, SAMPLE_UNIT, FeaturePlan, count_segments
from isobit.order.samples import Samples, segment_size
from isobit.order.tree import Counter, Node


@dataclass(frozen=True)
class Partial:
    """Subtrees of a sum: `values[i]`, in the dtype additions have, is node `nodes[i]` of `segments` segments."""

    nodes: tuple[Node, ...]
    values: Tensor
    segments: int


def output(x: Tensor, weight: Tensor, cut: Cut) -> Partial:
    """A K-share of y: x is [..., K/parts], weight [N, K/parts]. The bias belongs to `merge`."""
    check_tensors(x=x, weight=weight)
    check_share("x", x, cut)
    check_share("weight", weight, cut)
    if dispatch.is_native(x.dtype):
        values = torch.ops.isobit.linear_roots(x, weight, cut.extent, cut.start)
    else:
        values = _portable(cut, portable.widen(x), portable.widen(weight))
        values = values.reshape(-1, *x.shape[:-1], weight.shape[0])
    return Partial(cut.roots, values, FeaturePlan(cut.extent).count)


def input_grad(grad: Tensor, weight: Tensor, cut: Cut) -> Partial:
    """An N-share of dX: grad is [..., N/parts], weight [N/parts, K]."""
    check_tensors(grad=grad, weight=weight)
    check_share("grad", grad, cut)
    check_share("weight.t()", weight.t(), cut)
    if dispatch.is_native(grad.dtype):
        values = torch.ops.isobit.linear_input_grad_roots(grad, weight, cut.extent, cut.start)
    else:
        values = _portable(cut, portable.widen(grad), portable.widen(weight).t())
        values = values.reshape(-1, *grad.shape[:-1], weight.shape[1])
    return Partial(cut.roots, values, FeaturePlan(cut.extent).count)


def group_input_grad(
    grads: Sequence[Tensor], weights: Sequence[Tensor], groups: int, cut: Cut
) -> Partial:
    """A share of linear_group's dX: these `groups` whole groups, each [..., N/parts] by [N/parts, K]."""
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
    """A sample-share of dW: grad is [..., N], x [..., K], of the samples described."""
    check_tensors(grad=grad, x=x)
    spans = spans_of(samples, grad)
    spans_of(samples, x)
    if dispatch.is_native(x.dtype):
        values = torch.ops.isobit.linear_weight_grad_roots(
            grad, x, spans, samples.first, samples.of
        )
    else:
        left, right = portable.widen(grad).t(), portable.widen(x).t()
        sum_products = keeping_subnormals(portable.sum_products)
        values = sum_products(samples.segments, left, right, _first_segment(samples))
    return Partial(samples.roots, values, _sample_segments(samples))


def bias_grad(grad: Tensor, samples: Samples) -> Partial:
    """A sample-share of db: grad is [..., N], of the samples described."""
    check_tensors(grad=grad)
    spans = spans_of(samples, grad)
    if dispatch.is_native(grad.dtype):
        values = torch.ops.isobit.linear_bias_grad_roots(grad, spans, samples.first, samples.of)
    else:
        first = _first_segment(samples)
        values = keeping_subnormals(portable.sum_rows)(
            samples.segments, portable.widen(grad), first
        )
    return Partial(samples.roots, values, _sample_segments(samples))


@keeping_subnormals
def merge(partials: Iterable[Partial], *, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """All shares of one sum, given in any order, merged by the tree; then the bias; then one rounding."""
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
    return portable.round_once(total, dtype)


def check_share(name: str, tensor: Tensor, cut: Cut) -> None:
    """The last axis is the share."""
    if tensor.shape[-1] != cut.length:
        expected = f"[..., {cut.length}], one of {cut.parts} shares of {cut.extent}"
        refuse_shape(
            name, tensor, expected, "slice the summed axis from cut.start to cut.start + cut.length"
        )


def _portable(cut: Cut, left: Tensor, right: Tensor) -> Tensor:
    share = FeaturePlan(cut.extent).count // cut.parts
    segments = FeaturePlan(cut.extent).segments[
        :share
    ]  # positions are counted from the share's start
    return keeping_subnormals(portable.sum_products)(segments, left, right, cut.index * share)


def _first_segment(samples: Samples) -> int:
    return samples.first // segment_size(samples.of)


def _sample_segments(samples: Samples) -> int:
    return count_segments(samples.of, SAMPLE_UNIT, SAMPLE_CAP)
