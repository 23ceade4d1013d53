"""Registers what every operator has alike: shapes, a gradient, refusals of what has no order, and both executors.

[Note: Complete before it is used]
An operator that torch knows without its gradient gives `grad = None`, silently. The native operators exist once their
library is loaded, so their formulas are registered then, all of them and under a lock, before `dispatch.has_native`
says that they may be called. A module that is imported later registers its own while it is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from isobit.errors import UnsupportedError
from isobit.isolation import keeping_subnormals

_are_transforms_active = torch._C._are_functorch_transforms_active
_library = torch.library.Library("isobit", "FRAGMENT")  # type: ignore[no-untyped-call]
_lock = threading.Lock()
_pending: dict[str, Callable[[str], None]] = {}
_portable: set[str] = set()
_is_loaded = False


# ---- executors ------------------------------------------------------------------------------------------


def portable_operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function as the CPU kernel of a new operator `isobit::<name>`; the operator replaces it."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        _library.impl(name, keeping_subnormals(function), "CPU")  # type: ignore[no-untyped-call]
        _portable.add(name)
        return getattr(torch.ops.isobit, name)  # type: ignore[no-any-return]

    return register


def is_portable_operator(name: str) -> bool:
    """Tell whether `isobit::<name>` was made by `portable_operator`."""
    return name in _portable


def declare(name: str, register_formulas: Callable[[str], None]) -> None:
    """Register the formulas of `isobit::portable_<name>`; those of the native `isobit::<name>` once it is loaded."""
    register_formulas(f"portable_{name}")
    with _lock:
        if _is_loaded:
            register_formulas(name)
        else:
            _pending[name] = register_formulas


def register_native_operators() -> None:
    """Register the formulas of every native operator; called when their library is loaded."""
    global _is_loaded
    with _lock:
        while _pending:
            name = next(iter(_pending))
            _pending[name](name)
            del _pending[name]
        _is_loaded = True


# ---- refusals -------------------------------------------------------------------------------------------


def refuse_second_order(public: str) -> Callable[..., None]:
    """Return a backward that raises: a gradient's gradient has its own sums, which have no order yet."""

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
            remedy="put the mapped axis into the leading axes, and say samples= if it is not the batch",
        )

    return refuse


def refuse_forward_mode(public: str) -> Callable[..., None]:
    """Return a jvp that raises: a tangent has its own sums, which have no order yet."""

    def refuse(*_: Any) -> None:
        raise UnsupportedError(
            expected="tensors without tangents",
            received=f"a forward-mode derivative (torch.func.jvp, jacfwd, dual tensors) through isobit.{public}",
            remedy="take it in reverse mode (torch.autograd.grad, Tensor.backward), or use torch's own operator",
        )

    return refuse


def check_derivatives(public: str, arguments: tuple[Any, ...]) -> None:
    """Raise where a derivative is asked for that would be silently zero, or fail without a name."""
    if forward_ad._current_level >= 0:  # -1 unless forward mode is in use anywhere in the process
        check_tangents(public, arguments)
    if _are_transforms_active():
        check_transforms(public, arguments)


def check_transforms(public: str, arguments: tuple[Any, ...]) -> None:
    """Raise where torch.func differentiates: torch's registered gradients do not serve its transforms."""
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        raise UnsupportedError(
            expected="autograd's reverse mode",
            received=f"a gradient by torch.func (grad, vjp, jacrev) through isobit.{public}",
            remedy="call requires_grad_() on its inputs, then torch.autograd.grad or Tensor.backward",
        )


def has_tangent(tensor: Tensor) -> bool:
    """Tell whether a tensor is dual, in any of the torch.func transforms that are nested around this call."""
    while forward_ad.unpack_dual(tensor).tangent is None:  # type: ignore[no-untyped-call]
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return True


def check_tangents(public: str, arguments: tuple[Any, ...]) -> None:
    """Raise where an argument, or an item of a list of them, is a dual tensor."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            check_tangents(public, tuple(argument))
        elif isinstance(argument, Tensor) and has_tangent(argument):
            refuse_forward_mode(public)()


# ---- formulas -------------------------------------------------------------------------------------------


def register_operator(
    public: str,
    name: str,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Register the formulas of `isobit::<name>`, which serves isobit.<public>; without a gradient, it is one itself."""
    full = f"isobit::{name}"
    torch.library.register_fake(full, fake)
    torch.library.register_vmap(full, refuse_vmap(public))
    operator = getattr(torch.ops.isobit, name).default
    # As torch.library.register_autograd, whose kernel drops tangents: a forward-mode derivative would be zero.
    kernel = make_autograd_impl(
        operator, Info(backward or refuse_second_order(public), setup_context)
    )

    def differentiate(keyset: Any, *arguments: Any, **options: Any) -> Any:
        check_derivatives(public, arguments)
        return kernel(keyset, *arguments, **options)

    _library.impl(name, differentiate, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
