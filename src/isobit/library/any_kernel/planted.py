"""Wrong gradients, for every operator that `isobit check --like` knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor


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
    """Wrong subjects of an operator: the output is right, and the gradient of every argument is wrong."""

    reference: ClassVar[Callable[..., Tensor]]  # by torch, exact enough in fp64

    @classmethod
    def changed(cls, given: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the operator in fp32, with a change of the gradients."""
        real = [t for t in given if t.is_floating_point()]  # others are ids
        passed = [
            Passed.apply(t, change).float() if t.is_floating_point() else t  # type: ignore[no-untyped-call]
            for t in given
        ]
        return cls.reference(*passed).to(real[0].dtype)

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
