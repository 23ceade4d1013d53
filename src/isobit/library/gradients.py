"""Gradients by autograd, and planted kernels that are wrong in their gradients or in their values alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., Sequence[Tensor | None]]  # (grad, *tensors) -> a gradient per tensor


def gradients(
    function: Callable[..., Any], tensors: Sequence[Tensor], grad: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of `function(*tensors, **options)` with respect to each tensor."""
    return forward_and_gradients(function, tensors, grad, **options)[1]


def forward_and_gradients(
    function: Callable[..., Any], tensors: Sequence[Tensor], grad: Any, **options: Any
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the output, which may be several tensors, and the gradients of each of `tensors`."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        y = function(*leaves, **options)
    return y, torch.autograd.grad(y, leaves, grad)


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, backward: Backward, *tensors: Tensor) -> Tensor:
        ctx.chosen = backward
        ctx.save_for_backward(*tensors)
        return function(*tensors)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.chosen(grad, *ctx.saved_tensors)


def with_backward(function: Callable[..., Tensor], backward: Backward, *tensors: Tensor) -> Tensor:
    """Call `function(*tensors)`; its gradients are what `backward(grad, *tensors)` returns."""
    return _WithBackward.apply(function, backward, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def with_value(right: Tensor, wrong: Tensor) -> Tensor:
    """Return the value of `wrong` with the gradient of `right`."""
    return with_backward(
        lambda right, wrong: wrong.clone(), lambda grad, *_: (grad, None), right, wrong
    )
