"""Additions of the residual stream, forward and backward, with one bit pattern for NaN.

Stock's addition of 16-bit numbers writes another NaN in its vector body than in its tail, so that a NaN's bits would
depend on the batch. Finite sums have stock's bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.portable.sums import settle_nans


def add(left: Tensor, right: Tensor) -> Tensor:
    """Return left + right, with the same bits for every NaN."""
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        return _Add.apply(left, right)  # type: ignore[no-untyped-call,no-any-return]
    return plain_add(left, right)


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x for two uses whose gradients are added here and not by autograd."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Fork.apply(x)  # type: ignore[no-untyped-call,no-any-return]
    return x, x


def plain_add(left: Tensor, right: Tensor) -> Tensor:
    """Add with torch's own addition, and give every NaN the same bits."""
    return settle_nans(left + right)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.dtypes = left.dtype, right.dtype  # under autocast a branch is narrower than the stream
        return plain_add(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.dtypes
        return grad.to(left), grad.to(right)


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # zeros would change the sign of a zero
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None or second is None:
            return second if first is None else first
        return plain_add(first, second)
