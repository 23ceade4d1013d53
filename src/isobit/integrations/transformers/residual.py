"""Values with several uses, and the residual stream: one bit pattern for NaN, forward and backward.

Stock's addition of 16-bit numbers writes another NaN in its vector body than in its tail, so that a NaN's bits would
depend on the batch. Finite sums have stock's bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.portable.rounding import settle_nans


def fork(x: Tensor, uses: int = 2) -> tuple[Tensor, ...]:
    """Return x for several uses, whose gradients are added here and not by autograd.

    They are added from left to right in fp32, or in their dtype if it is wider, and rounded once.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Fork.apply(x, uses)  # type: ignore[no-untyped-call,no-any-return]
    return (x,) * uses


def settle(x: Tensor, *, forward: bool) -> Tensor:
    """Return x, with the same bits for every NaN: of x itself, or of the gradient that comes back to it."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Settle.apply(x, forward)  # type: ignore[no-untyped-call,no-any-return]
    return settle_nans(x) if forward else x


def plain_add(left: Tensor, right: Tensor) -> Tensor:
    """Add with torch's own addition, and give every NaN the same bits."""
    return settle_nans(left + right)


class _Settle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool) -> Tensor:
        ctx.backward_too = not forward
        return settle_nans(x.clone()) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return settle_nans(grad.clone()) if ctx.backward_too else grad, None


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, uses: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # zeros would change the sign of a zero
        return tuple(x.view_as(x) for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        found = [grad for grad in grads if grad is not None]
        if len(found) < 2:
            return (found[0] if found else None), None
        total = found[0] if found[0].dtype == torch.float64 else found[0].float()
        for grad in found[1:]:
            total = total + grad
        return settle_nans(total.to(found[0].dtype)), None
