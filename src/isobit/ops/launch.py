"""One call of an operator: its executor is picked, the launch is told, native formulas are registered first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.ops import dispatch

_pending: dict[str, Callable[[str], None]] = {}


def declare(name: str, register_formulas: Callable[[str], None]) -> None:
    """An operator `isobit::<name>`, and its twin `isobit::portable_<name>`, which is there now."""
    register_formulas(f"portable_{name}")
    _pending[name] = register_formulas


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def register_native(name: str) -> bool:
    """Registers the native operator's formulas, once, after its library is loaded."""
    register_formulas = _pending.pop(name, None)
    if register_formulas is not None:
        register_formulas(name)
    return True


def launch(name: str, sizes: tuple[int, ...], *given: Any, dtype: torch.dtype | None = None) -> Any:
    """The operator on `given`; the first tensor's dtype decides, unless said. A recording is told `sizes`."""
    chosen = given[0].dtype if dtype is None else dtype
    native = dispatch.is_native(chosen)
    if dispatch.is_recording():
        dispatch.record(name, native, chosen, sizes)
    if native:
        register_native(name)
        return getattr(torch.ops.isobit, name)(*given)
    return getattr(torch.ops.isobit, f"portable_{name}")(*given)


def rows_and_columns(x: Tensor) -> tuple[int, int]:
    """As launches of functions of rows and of elements are told."""
    return (x.shape[:-1].numel(), x.shape[-1]) if x.dim() else (1, 1)
