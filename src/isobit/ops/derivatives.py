"""Raise for derivatives that have no defined order of addition: second order, forward mode, torch.func and vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from isobit.errors import UnsupportedError

_are_transforms_active = torch._C._are_functorch_transforms_active


def refuse_second_order(public: str) -> Callable[..., None]:
    """Return a backward that raises: a gradient of a gradient has sums of its own, which have no defined order."""

    def refuse(*_: Any) -> None:
        raise UnsupportedError(
            expected="first-order gradients",
            received=f"a gradient of isobit.{public}'s gradient",
            remedy="use torch's own operator where second-order gradients are needed",
        )

    return refuse


def refuse_vmap(public: str) -> Callable[..., None]:
    """Return a vmap rule that raises: vmap hides the batch, which the sample tree must see."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError(
            expected="a plain call",
            received=f"torch.func.vmap over isobit.{public}",
            remedy="put the mapped axis into the leading axes, and pass samples= if it is not the batch",
        )

    return refuse


def refuse_forward_mode(public: str) -> Callable[..., None]:
    """Return a jvp that raises: a tangent has sums of its own, which have no defined order."""

    def refuse(*_: Any) -> None:
        raise UnsupportedError(
            expected="tensors without tangents",
            received=f"a forward-mode derivative (torch.func.jvp, jacfwd, dual tensors) through isobit.{public}",
            remedy="take it in reverse mode (torch.autograd.grad, Tensor.backward), or use torch's own operator",
        )

    return refuse


def check_derivatives(public: str, arguments: tuple[Any, ...]) -> None:
    """Raise where a derivative is requested that torch would silently return as zero, or fail without a name."""
    if forward_ad._current_level >= 0:  # -1 unless forward mode is in use anywhere in the process
        check_tangents(public, arguments)
    if _are_transforms_active():
        check_transforms(public, arguments)


def check_transforms(public: str, arguments: tuple[Any, ...]) -> None:
    """Raise where torch.func differentiates: its transforms do not use torch's registered gradients."""
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        raise UnsupportedError(
            expected="autograd's reverse mode",
            received=f"a gradient by torch.func (grad, vjp, jacrev) through isobit.{public}",
            remedy="call requires_grad_() on its inputs, then torch.autograd.grad or Tensor.backward",
        )


def check_tangents(public: str, arguments: tuple[Any, ...]) -> None:
    """Raise where an argument, or an item of a list of them, is a dual tensor."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            check_tangents(public, tuple(argument))
        elif isinstance(argument, Tensor) and has_tangent(argument):
            refuse_forward_mode(public)()


def has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor is dual in any of the torch.func transforms that are nested around this call."""
    while forward_ad.unpack_dual(tensor).tangent is None:  # type: ignore[no-untyped-call]
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return True
