"""The route operator: its torch operators, their gradient, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.device_tables import table_of
from isobit.ops.experts import portable, rows  # noqa: F401 (the folder's operators are declared together)
from isobit.ops.experts.routes import Routes
from isobit.ops.portable.samples import as_samples, check_rows, whole_samples
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.order.samples import Samples

SCORES = ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen")


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    samples: Samples | Tensor | None = None,
) -> Routes:
    """Choose k experts for each token; a token's route does not depend on other tokens.

    Experts are chosen by the largest score; among equal scores, by the lowest id. Rows that belong to no sample are
    padding, and go to no expert.

    Args:
        logits: Shape [..., E], in fp32, bf16 or fp16. Scores are computed in fp32.
        k: The number of experts of each token.
        score: "softmax" over all experts; "sigmoid" of each logit; or "softmax_of_chosen" or "sigmoid_of_chosen": the k
            largest logits are chosen, and the function is taken of these.
        normalize: Divide the weights by their sum over the k slots. Not used by the functions of chosen logits.
        scale: A factor of the weights.
        bias: Shape [E], added to the scores for the choice only; it has no gradient.
        groups: The number of groups of consecutive experts.
        top_groups: The number of groups from which experts are chosen: those with the largest sum of two scores.
        samples: The rows of each sample; see isobit.linear.

    Returns:
        The routes; their weights are in fp32.

    Raises:
        ArgumentError: If shapes do not fit together, or there are fewer than k experts to choose from.
        UnsupportedError: If a CUDA graph is being captured, for the host reads how many rows each expert has.

    Example:
        >>> isobit.route(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), 2).experts
        tensor([[1, 2]])
    """
    check_tensors(WITH_GPU, logits=logits)
    if logits.dim() < 2 or not logits.shape[-1]:
        refuse_shape("logits", logits, "[..., E]", "pass one row of logits per token")
    count = logits.shape[-1]
    check_choice(count, k, score, groups, top_groups)
    if bias is not None and bias.shape != (count,):
        refuse_shape("bias", bias, f"[{count}]", "pass one bias per expert")
    known = as_samples(samples)
    if known is None:
        known = whole_samples(logits, None)
    check_rows(known, logits)
    flat = logits.reshape(-1, count)
    spans = None if samples is None else table_of(known.spans, (-1, 2), torch.device("cpu"))
    detached = None if bias is None else bias.detach()
    how = (k, score, normalize, float(scale), groups, top_groups)
    weights, experts = launch("route", rows_and_columns, flat, detached, spans, *how)
    return Routes.planned(experts, weights, count, known)


def check_choice(count: int, k: int, score: str, groups: int, top_groups: int) -> None:
    """Raise unless k experts can be chosen."""
    if score not in SCORES:
        raise ArgumentError(
            expected=f"score as one of {', '.join(SCORES)}",
            received=repr(score),
            remedy="pass the function that the model's router applies to its logits",
        )
    if groups < 1 or count % groups or not 1 <= top_groups <= groups:
        raise ArgumentError(
            expected=f"groups that divide {count} experts, and at most as many top_groups",
            received=f"groups={groups}, top_groups={top_groups}",
            remedy="pass n_group and topk_group of the model's config",
        )
    if not 1 <= k <= count // groups * top_groups:
        raise ArgumentError(
            expected=f"k from 1 to {count // groups * top_groups}, the experts that can be chosen",
            received=f"k={k}",
            remedy="pass num_experts_per_tok of the model's config",
        )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, _, score, normalize, scale, _, _ = inputs
    ctx.how = score, normalize, scale
    ctx.save_for_backward(logits, output[1])


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def empty(logits: Tensor, bias: Any, spans: Any, k: int, *_: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        weights = logits.new_empty((len(logits), k), dtype=dtype)
        return weights, torch.empty_like(weights, dtype=torch.int64)

    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, name)
        return operator(grad, logits, experts, *ctx.how), *[None] * 8

    # One gradient for both executors of the CPU: its softmax is that of the executor that serves the dtype.
    name = "triton_route_backward" if prefix == "triton_route" else "portable_route_backward"
    register_operator("route", prefix, empty, backward, setup_context)
    if prefix != "route":
        register_operator("route", name, lambda grad, logits, *_: logits.new_empty(logits.shape))


@portable_operator("portable_route")
def portable_route(
    logits: Tensor,
    bias: Tensor | None,
    spans: Tensor | None,
    k: int,
    score: str,
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """Return weights and experts."""
    return portable.route(logits, bias, spans, k, score, normalize, scale, groups, top_groups)


@portable_operator("portable_route_backward")
def portable_route_backward(
    grad: Tensor, logits: Tensor, experts: Tensor, score: str, normalize: bool, scale: float
) -> Tensor:
    """Return the gradient of the logits."""
    return portable.route_backward(grad, logits, experts, score, normalize, scale)


declare("route", register_formulas, triton="isobit.ops.experts.triton")
