"""LoRA on the weights of experts: B_e(A_e x) for the rows of each expert, with A and B as PEFT stores them.

A of all experts is one matrix [E·r, K], and B one matrix [N, r·E] in which neighbours belong to different experts. The
operator takes the two as they are, because the gradients of a share of a batch are collected from leaves, which slices
of them are not. Each gradient is a sum over an expert's rows, as that of `isobit.grouped_linear` is.

[Note: merged experts] Weights are round(W_e + s·B_e A_e), as in [Note: merged adapters] of ops/linear/merged.py. The
output and the gradient of x are those of experts with the merged weights; the gradients of A and B are those of
adapters next to the weights, since the derivative through a merged weight is no sum over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.derivatives import (
    check_derivatives,
    refuse_forward_mode,
    refuse_second_order,
    refuse_vmap,
)
from isobit.ops.device_tables import split_table
from isobit.ops.experts.grouped import grouped_linear, matrix, runs
from isobit.ops.experts.routes import Routes, expert_spans
from isobit.ops.linear.merged import Adapter, merge_weight
from isobit.ops.registration import PREFIXES, executor_of
from isobit.ops.share import as_partial, check_share, gradient_dtype, share_in_force


def split_factors(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return views of A and B by expert, [E, r, K] and [E, N, r].

    Raises:
        ArgumentError: They are not [E·r, K] and [N, r·E].
    """
    if a.dim() != 2 or not len(a) or len(a) % experts:
        refuse_shape("a", a, f"[{experts} · r, K]", "pass lora_A.weight of PEFT's wrapper")
    if b.dim() != 2 or b.shape[1] != len(a):
        refuse_shape("b", b, f"[N, {len(a)}]", "pass lora_B.weight of PEFT's wrapper")
    return a.reshape(experts, -1, a.shape[1]), b.reshape(len(b), -1, experts).permute(2, 0, 1)


def low_rank_experts(x: Tensor, adapter: Adapter, *, routes: Routes) -> Tensor:
    """Return B_e(A_e x) of the rows of each expert.

    Args:
        x: The rows of all experts, [R, K], in the dtype of the adapter.
        adapter: `a` of shape [E·r, K] and `b` of shape [N, r·E]; its scale is not multiplied.
        routes: The routes of the tokens.

    Returns:
        Tensor [R, N] in the dtype of x.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.
    """
    a, b = adapter.a, adapter.b
    check_tensors(WITH_GPU, x=x, a=a, b=b)
    split_factors(a, b, routes.total)
    if x.shape != (len(routes.tokens), a.shape[1]):
        expected = f"[{len(routes.tokens)}, {a.shape[1]}]"
        refuse_shape("x", x, expected, "pass the rows that isobit.dispatch_rows returned")
    check_derivatives("grouped_linear", (x, a, b))
    check_share(routes.samples, a, b)
    return _LowRank.apply(x, a, b, routes)  # type: ignore[no-any-return,no-untyped-call]


@torch.no_grad()
def merge_experts(weight: Tensor, adapters: Sequence[Adapter], *, transposed: bool) -> Tensor:
    """Return round(W_e + s₁·B₁_e A₁_e + …) of all experts, in the shape of `weight`, which is not written.

    Args:
        weight: Shape [E, N, K], or [E, K, N] if `transposed`.
        adapters: Those to merge, in the order of addition.
        transposed: Whether each expert's weight has its inputs first.
    """
    count, merged = len(weight), torch.empty_like(weight)
    factors = [split_factors(adapter.a, adapter.b, count) for adapter in adapters]
    for expert in range(count):
        own = [
            Adapter(a[expert], b[expert].contiguous(), adapter.scale)
            for adapter, (a, b) in zip(adapters, factors, strict=True)
        ]
        made = merge_weight(matrix(weight, expert, transposed), own)
        merged[expert] = made.t() if transposed else made
    return merged


def merged_grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapters: Sequence[Adapter],
    *,
    routes: Routes,
    transposed: bool = False,
) -> Tensor:
    """Compute the linear layer of each expert with its adapters merged; see [Note: merged experts].

    Raises:
        UnsupportedError: If the gradient of the weight itself is wanted.
    """
    merged = merge_experts(weight, adapters, transposed=transposed)
    y = grouped_linear(x, merged, bias, routes=routes, transposed=transposed)
    if not torch.is_grad_enabled():
        return y
    if weight.requires_grad:
        raise UnsupportedError(
            expected="frozen weights of experts, where adapters are merged into them",
            received="a weight of experts with requires_grad=True",
            remedy="call requires_grad_(False) of the base weights, as PEFT does; or "
            "isobit.enable(model, adapters='beside')",
        )
    for adapter in adapters:
        if adapter.a.requires_grad or adapter.b.requires_grad:
            rows = x.detach().to(adapter.a.dtype)
            added = low_rank_experts(rows, adapter, routes=routes) * adapter.scale
            y = _Graft.apply(y, added)  # type: ignore[no-untyped-call]
    return y


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, routes: Routes) -> Tensor:
        down, up = split_factors(a, b, routes.total)
        with torch.autocast(x.device.type, enabled=False):
            low = grouped_linear(x, down, routes=routes)
            y = grouped_linear(low, up.contiguous(), routes=routes)
        ctx.save_for_backward(x, a, b, low, routes.tokens)
        ctx.rows, ctx.samples, ctx.share = routes.rows, routes.samples, share_in_force()
        return y

    jvp = staticmethod(refuse_forward_mode("grouped_linear"))
    vmap = staticmethod(refuse_vmap("grouped_linear"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, a, b, low, tokens = ctx.saved_tensors
        check_derivatives("grouped_linear", (grad,))
        if grad.requires_grad and torch.is_grad_enabled():
            refuse_second_order("grouped_linear")()
        prefix = PREFIXES[executor_of("linear", x.dtype, (x, a))] + "linear"
        into_x, into_weight = (
            getattr(torch.ops.isobit, f"{prefix}_{kind}_grad") for kind in ("input", "weight")
        )
        samples, want, count = ctx.samples, ctx.needs_input_grad, len(ctx.rows)
        dtype = gradient_dtype(x.dtype, len(samples.spans), samples.total)
        dx = x.new_empty(x.shape) if want[0] else None
        # +0 for an expert without rows
        da, db = a.new_zeros(a.shape, dtype=dtype), b.new_zeros(b.shape, dtype=dtype)
        down, up = split_factors(a, b, count)  # [E, r, K], [E, N, r]
        into_down, into_up = split_factors(da, db, count)
        spans = split_table(expert_spans(tokens, ctx.rows, samples), x.device)
        for expert, at in runs(ctx.rows):
            g, of = grad[at], samples.total
            inner = into_x(g, up[expert].contiguous())  # [rows, r]
            if dx is not None:
                dx[at] = into_x(inner, down[expert])
            if want[1]:
                into_down[expert] = into_weight(inner, x[at], spans[expert], of)
            if want[2]:
                into_up[expert] = into_weight(g, low[at], spans[expert], of)
        return (
            dx,
            as_partial(da, ctx.share) if want[1] else None,
            as_partial(db, ctx.share) if want[2] else None,
            None,
        )


class _Graft(torch.autograd.Function):
    """Returns the first of two values; both get its gradient, each in its own dtype."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        ctx.dtype = other.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.dtype)
