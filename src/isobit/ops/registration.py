"""Register an operator with torch (schema, fake, gradient, executors), and call it.

An operator `name` is two torch operators: `isobit::portable_<name>`, made here from a Python function, and the native
`isobit::<name>`, which csrc defines. Both have the same arguments and the same formulas, and so has the third that some
have, `isobit::triton_<name>`; see [Note: a third executor] in isobit/ops/gpu/executors.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl

from isobit.foundation import backends, launches
from isobit.foundation.machine import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.derivatives import check_derivatives, refuse_second_order, refuse_vmap
from isobit.ops.gpu import executors

_library = torch.library.Library("isobit", "FRAGMENT")  # type: ignore[no-untyped-call]
_portable: set[str] = set()
_without_kernel: set[str] = set()
_with_python_formula: set[torch._ops.OpOverload] = set()
PREFIXES = {"triton": "triton_", "native": "", "portable": "portable_"}


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
    """Return whether `isobit::<name>` was made by `portable_operator`."""
    return name in _portable


def declare(
    name: str,
    register_formulas: Callable[[str], None],
    *,
    native: bool = True,
    triton: str = "",
) -> None:
    """Register the formulas of `isobit::portable_<name>` now, and of `isobit::<name>` when kernels are attested.

    Args:
        name: The operator's name in `torch.ops.isobit`.
        register_formulas: Calls `register_operator` for the forward and backward operators with a given prefix.
        native: False for an operator that has no native kernel; every call then uses the portable executor.
        triton: The module that defines `isobit::triton_<name>`; its formulas are registered on first use.
    """
    register_formulas(f"portable_{name}")
    if native:
        dispatch.when_attested(lambda: register_formulas(name))
    else:
        _without_kernel.add(name)
    if triton:
        executors.declare_triton(name, register_formulas, triton)


def register_operator(
    public: str,
    name: str,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Register the formulas of `isobit::<name>`.

    Args:
        public: The public function that the operator serves, for error messages.
        name: The operator's name in `torch.ops.isobit`.
        fake: Returns empty outputs of the right shapes and dtypes.
        backward: The gradient, as for torch.library.register_autograd; None for an operator that is a gradient.
        setup_context: As for torch.library.register_autograd.
    """
    full = f"isobit::{name}"
    torch.library.register_fake(full, fake)
    torch.library.register_vmap(full, refuse_vmap(public))
    operator = getattr(torch.ops.isobit, name).default  # made here, before threads call it
    if torch._C._dispatch_has_kernel_for_dispatch_key(full, "Autograd"):
        return  # csrc/derivatives.cpp has its formula, compiled for this torch
    # As torch.library.register_autograd, whose kernel drops tangents: a forward-mode derivative would be zero.
    kernel = make_autograd_impl(
        operator, Info(backward or refuse_second_order(public), setup_context)
    )

    def differentiate(keyset: Any, *arguments: Any, **options: Any) -> Any:
        check_derivatives(public, arguments)
        return kernel(keyset, *arguments, **options)

    _library.impl(name, differentiate, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    _with_python_formula.add(operator)


def register_compiled_gradients() -> None:
    """Register the formulas of csrc/derivatives.cpp if they were compiled for this torch, and the check they call.

    Under another minor version `register_operator` finds none, and registers those in Python, which cost tens of
    microseconds a call.
    """
    torch.ops.isobit.register_gradients(torch.__version__)
    _library.impl("check_derivatives", check_derivatives, "Autograd")  # type: ignore[no-untyped-call]


dispatch.when_attested(register_compiled_gradients)


def launch(
    name: str,
    sizes: tuple[int, ...] | Callable[[Tensor], tuple[int, ...]],
    *given: Any,
    dtype: torch.dtype | None = None,
) -> Any:
    """Call the operator `name` with `given`, on the executor that serves its dtype and device.

    Args:
        name: The operator's name, without `portable_`.
        sizes: The sizes of the call, for `isobit.foundation.launches.record_launches`, or a function of the first
            argument that returns them.
        given: The operator's arguments.
        dtype: The dtype that chooses the executor; by default that of the first argument.

    Raises:
        UnsupportedError: If a tensor is on a GPU or a backend is chosen, and the operator has no Triton executor.
    """
    chosen = given[0].dtype if dtype is None else dtype
    executor = executor_of(name, chosen, given)
    if launches.is_recording():
        launches.record(
            name, executor, chosen, sizes if isinstance(sizes, tuple) else sizes(given[0])
        )
    is_followed = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if executor == "triton" and not is_followed:
        function = executors.without_dispatcher(name, given)
        if function is not None:
            check_derivatives(name, given)
            # As within an operator: views that the function makes are not tracked.
            with torch._C._AutoDispatchBelowAutograd():
                return function(*given)
    # The overload itself: its packet would look for it at every call.
    operator = getattr(torch.ops.isobit, PREFIXES[executor] + name).default
    if is_followed or operator not in _with_python_formula:
        return operator(*given)
    # Without gradients a formula in Python only checks, and costs tens of microseconds.
    check_derivatives(name, given)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*given)


def executor_of(name: str, dtype: torch.dtype, given: tuple[Any, ...]) -> str:
    """Return the executor of a call, "triton", "native" or "portable", after it is registered and attested."""
    is_backend = backends.chosen() is not None
    if is_backend or executors.is_asked_for(given):
        executors.prepare(name, dtype)
        if not is_backend:
            require_attested(name, dtype, given)
        return "triton"
    return "native" if name not in _without_kernel and dispatch.is_native(dtype) else "portable"


def require_attested(name: str, dtype: torch.dtype, given: tuple[Any, ...]) -> None:
    """Raise EngineError unless an operator is attested on the GPU of a call's tensors.

    Attestation is imported by name, so that evidence of the CPU's executors does not cover its source.
    """
    device = next(t.device for t in given if isinstance(t, Tensor) and t.is_cuda)
    import_module("isobit.ops.gpu.attestation").require(name, dtype, device)


def rows_and_columns(x: Tensor) -> tuple[int, int]:
    """Return (rows, n), the sizes under which launches of functions of rows and of elements are recorded."""
    return (x.shape[:-1].numel(), x.shape[-1]) if x.dim() else (1, 1)
