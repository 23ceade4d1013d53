"""The linear layers of all experts as one operator, over the engines of isobit.linear.

Each row is `isobit.linear`'s row of its expert. The gradient of an expert's weight is that of `isobit.linear` over the
expert's rows, whose samples are the runs that the samples have among them: leaves of 256 routed tokens of a sample,
then the sample tree. An expert without rows has a gradient of +0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isobit.foundation import launches
from isobit.ops.arguments import WITH_GPU, cast_for_autocast, check_tensors, refuse_shape
from isobit.ops.derivatives import (
    check_derivatives,
    refuse_forward_mode,
    refuse_second_order,
    refuse_vmap,
)
from isobit.ops.device_tables import split_table
from isobit.ops.experts.routes import Routes, expert_spans
from isobit.ops.linear.op import sizes_of
from isobit.ops.registration import PREFIXES, executor_of, launch
from isobit.ops.share import as_partial, check_share, gradient_dtype, share_in_force


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    routes: Routes,
    transposed: bool = False,
) -> Tensor:
    """Compute the linear layer of each expert on its rows: `x @ weight[e].T + bias[e]`.

    Each row of the result is that of isobit.linear with its expert's weight. The gradients of weight and bias depend on
    the samples of the global batch, and not on how it is padded, packed or cut into micro-batches.

    Args:
        x: The rows of all experts, [R, K], in the order of isobit.dispatch_rows.
        weight: Shape [E, N, K], or [E, K, N] if `transposed`, in the dtype of x.
        bias: Shape [E, N], in the dtype of x.
        routes: The routes of the tokens, which say how many rows each expert has.
        transposed: Whether each expert's weight has its inputs first.

    Returns:
        Tensor [R, N] in the dtype of x.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.

    Example:
        >>> x, weight = torch.randn(5, 16), torch.randn(4, 8, 16)
        >>> routes = isobit.route(torch.randn(5, 4), 2)
        >>> rows = isobit.dispatch_rows(x, routes)
        >>> y = isobit.grouped_linear(rows, weight, routes=routes)
        >>> torch.equal(y[: routes.rows[0]], isobit.linear(rows[: routes.rows[0]], weight[0]))
        True
    """
    x, weight, bias = cast_for_autocast(x, weight, bias)
    check_tensors(WITH_GPU, x=x, weight=weight, bias=bias)
    check_grouped(x, weight, bias, routes, transposed)
    check_derivatives("grouped_linear", (x, weight, bias))
    check_share(routes.samples, weight, bias)
    arguments = (x, weight, bias, routes.tokens, routes.rows, routes.samples, transposed)
    if not torch.is_grad_enabled():
        return _Grouped.forward(*arguments)
    return _Grouped.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]


def check_grouped(
    x: Tensor, weight: Tensor, bias: Tensor | None, routes: Routes, transposed: bool
) -> None:
    """Raise unless x is [R, K], weight [E, N, K] and bias [E, N]."""
    if weight.dim() != 3 or len(weight) != routes.total:
        shape = "[{}, K, N]" if transposed else "[{}, N, K]"
        refuse_shape("weight", weight, shape.format(routes.total), "pass one matrix per expert")
    outputs, inputs = weight.shape[:0:-1] if transposed else weight.shape[1:]
    if x.shape != (len(routes.tokens), inputs):
        expected = f"[{len(routes.tokens)}, {inputs}]"
        refuse_shape("x", x, expected, "pass the rows that isobit.dispatch_rows returned")
    if bias is not None and bias.shape != (routes.total, outputs):
        refuse_shape("bias", bias, f"[{routes.total}, {outputs}]", "pass one bias per expert")


def runs(rows: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and which they are."""
    at = 0
    for expert, count in enumerate(rows):
        if count:
            yield expert, slice(at, at + count)
        at += count


def matrix(weight: Tensor, expert: int, transposed: bool) -> Tensor:
    """Return an expert's weight as [N, K]."""
    return weight[expert].t().contiguous() if transposed else weight[expert]


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        rows: tuple[int, ...],
        samples: Any,
        transposed: bool,
    ) -> Tensor:
        executor = executor_of("linear", x.dtype, (x, weight))
        if executor == "native" and not launches.is_recording():
            # The loop below in one call.
            found: Tensor = torch.ops.isobit.grouped_linear_forward(
                x, weight, bias, list(rows), transposed
            )
            return found
        y = x.new_empty(len(x), weight.shape[2 if transposed else 1])
        for expert, at in runs(rows):
            own = matrix(weight, expert, transposed)
            added = None if bias is None else bias[expert]
            y[at] = launch("linear", sizes_of(x[at], own), x[at], own, added, None, None, 0)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, tokens, ctx.rows, ctx.samples, ctx.transposed = inputs
        ctx.save_for_backward(x, weight, tokens)
        ctx.prefix = PREFIXES[executor_of("linear", x.dtype, (x, weight))] + "linear"
        ctx.has_bias, ctx.share = bias is not None, share_in_force()

    jvp = staticmethod(refuse_forward_mode("grouped_linear"))
    vmap = staticmethod(refuse_vmap("grouped_linear"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, tokens = ctx.saved_tensors
        check_derivatives("grouped_linear", (grad,))
        if grad.requires_grad and torch.is_grad_enabled():
            refuse_second_order("grouped_linear")()
        into_x, into_weight, into_bias = (
            getattr(torch.ops.isobit, f"{ctx.prefix}_{kind}_grad")
            for kind in ("input", "weight", "bias")
        )
        samples, want = ctx.samples, ctx.needs_input_grad
        dtype = gradient_dtype(x.dtype, len(samples.spans), samples.total)
        dx = x.new_empty(x.shape) if want[0] else None
        dw = weight.new_zeros(weight.shape, dtype=dtype) if want[1] else None
        outputs = weight.shape[2 if ctx.transposed else 1]
        has_db = ctx.has_bias and want[2]
        db = weight.new_zeros((len(weight), outputs), dtype=dtype) if has_db else None
        spans = split_table(expert_spans(tokens, ctx.rows, samples), x.device)
        for expert, at in runs(ctx.rows):
            g, of = grad[at], samples.total
            if dx is not None:
                dx[at] = into_x(g, matrix(weight, expert, ctx.transposed))
            if dw is not None:
                made = into_weight(g, x[at], spans[expert], of)
                dw[expert] = made.t() if ctx.transposed else made
            if db is not None:
                db[expert] = into_bias(g, spans[expert], of)
        return (
            dx,
            None if dw is None else as_partial(dw, ctx.share),
            None if db is None else as_partial(db, ctx.share),
            *[None] * 4,
        )
