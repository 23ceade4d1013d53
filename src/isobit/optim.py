"""Clipping by the exact global norm, and AdamW in the form whose elements do not see each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.isolation import keeping_subnormals
from isobit.ops.exact_sum.op import exact_state, round_state
from isobit.ops.portable.rounding import settle_nans
from isobit.ops.unfinished import refuse_unfinished

MARGIN = 1e-6  # as torch's, added to the norm before the division


def total_norm(tensors: Tensor | Iterable[Tensor]) -> Tensor:
    """The 2-norm of all elements, fp32: the root of their exact sum of squares, the same bits however they are cut."""
    return norm_of(
        exact_state([tensors] if isinstance(tensors, Tensor) else list(tensors), squared=True)
    )


@keeping_subnormals
def norm_of(state: Tensor) -> Tensor:
    """From the digits of a sum of squares; those of several ranks are added before."""
    return round_state(state, torch.float64).sqrt().float()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales gradients in place by min(1, max_norm / (norm + 1e-6)); returns the norm before, fp32.

    As torch.nn.utils.clip_grad_norm_ with the 2-norm, but with one value for the norm, however gradients are cut.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_unfinished("clip_grad_norm_", given)
    grads = [p.grad for p in given if p.grad is not None]
    norm = total_norm(grads)
    if error_if_nonfinite and not norm.isfinite():
        raise UnsupportedError(
            expected="gradients of finite norm",
            received=f"a norm of {norm.item()}",
            remedy="find the gradient that is not finite, or pass error_if_nonfinite=False",
        )
    scale_by_norm(grads, norm, max_norm)
    return norm


@keeping_subnormals
def scale_by_norm(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """In place; each product is rounded once to its dtype."""
    scale = (max_norm / (norm + MARGIN)).clamp(max=1.0)
    finite = bool(norm.isfinite())
    for grad in grads:
        grad.mul_(scale)
        if not finite:  # inf · 0: a 16-bit NaN would depend on the lane
            settle_nans(grad)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW without `fused`, whose tails have other bits than its vectors: shards would differ.

    The plain and the foreach form give the same bits to an element, wherever it stands and however it is cut.
    """

    def __init__(self, params: Any, *args: Any, fused: bool | None = None, **options: Any) -> None:
        refuse_fused(fused)
        super().__init__(params, *args, fused=None, **options)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; a state dict may have brought `fused` back.

        The step keeps subnormals whatever `torch.set_flush_denormal` says; the closure runs as the caller left it.
        """
        for group in self.param_groups:
            refuse_fused(group["fused"])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        keeping_subnormals(unhooked_step)(self)
        return loss


def unhooked_step(optimizer: AdamW) -> None:
    """Torch's step alone: it runs hooks around AdamW.step, and around its parent's once a parent was made too."""
    step: Any = torch.optim.AdamW.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def refuse_fused(fused: bool | None) -> None:
    """Fails closed."""
    if fused:
        raise ArgumentError(
            expected="fused=None or False",
            received=f"fused={fused}",
            remedy="leave fused out, or pass foreach=True; both give every element the same bits however it is cut",
        )
