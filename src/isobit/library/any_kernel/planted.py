"""Wrong gradients of every operator that `isobit check --like` knows: the output is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from isobit.library.any_kernel import operators
from isobit.library.any_kernel.within import Operator


class Passed(torch.autograd.Function):
    """The identity, with a gradient that is changed on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x."""
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Change the gradient."""
        return ctx.change(grads[0]), None


def without_last(grad: Tensor) -> Tensor:
    """Leave the last column out."""
    grad = grad.clone()
    grad[..., -1] = 0
    return grad


class Planted:
    """The operator with wrong gradients of every argument."""

    OPERATOR: ClassVar[type[Operator]]

    @classmethod
    def changed(cls, given: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the operator in fp32, with a change of the gradients."""
        passed = [Passed.apply(t, change) for t in given]  # type: ignore[no-untyped-call]
        return cls.OPERATOR.reference(*(t.float() for t in passed)).to(given[0].dtype)

    @classmethod
    def scaled(cls, *given: Tensor) -> Tensor:
        """Return gradients that are larger by a thousandth."""
        return cls.changed(given, lambda grad: grad * (1 + 2.0**-10))

    @classmethod
    def without_tail(cls, *given: Tensor) -> Tensor:
        """Leave the last column of gradients out."""
        return cls.changed(given, without_last)

    @classmethod
    def narrow(cls, *given: Tensor) -> Tensor:
        """Round gradients to bf16."""
        return cls.changed(given, lambda grad: grad.bfloat16().to(grad.dtype))

    @classmethod
    def negated(cls, *given: Tensor) -> Tensor:
        """Turn the sign of gradients."""
        return cls.changed(given, torch.neg)


class Linear(Planted):
    """Wrong gradients of linear."""

    OPERATOR = operators.Linear


class RmsNorm(Planted):
    """Wrong gradients of rms_norm."""

    OPERATOR = operators.RmsNorm


class LayerNorm(Planted):
    """Wrong gradients of layer_norm."""

    OPERATOR = operators.LayerNorm


class Softmax(Planted):
    """Wrong gradients of softmax."""

    OPERATOR = operators.Softmax


class LogSoftmax(Planted):
    """Wrong gradients of log_softmax."""

    OPERATOR = operators.LogSoftmax


class Silu(Planted):
    """Wrong gradients of silu."""

    OPERATOR = operators.Silu


class Gelu(Planted):
    """Wrong gradients of gelu."""

    OPERATOR = operators.Gelu


class Swiglu(Planted):
    """Wrong gradients of swiglu."""

    OPERATOR = operators.Swiglu


class Attention(Planted):
    """Wrong gradients of attention."""

    OPERATOR = operators.Attention
