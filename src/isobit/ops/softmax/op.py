"""The softmax operator: its torch operators, their gradient, and the public function."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.registration import register_operator
from isobit.ops.softmax import portable


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / Σ exp(x - max) along `dim`, with bits that depend on that row of x alone.

    fp32, bf16 and fp16, summed in fp32 and rounded once. A row that holds a NaN or +inf, or only -inf, is NaN.
    """
    return along_axis("softmax", x, dim, register_native)


def along_axis(name: str, x: Tensor, dim: int, register: Callable[[], bool]) -> Tensor:
    """A function of rows, `isobit::<name>` or its portable form, with `dim` as the rows' axis."""
    check_tensors(x=x)
    check_axis(x, dim)
    last = dim in (-1, x.dim() - 1)
    rows = x if last else x.movedim(dim, -1)
    native = dispatch.is_native(x.dtype)
    if dispatch.is_recording():
        dispatch.record(name, native, x.dtype, (rows.shape[:-1].numel(), rows.shape[-1]))
    if native:
        register()
    y = getattr(torch.ops.isobit, name if native else f"portable_{name}")(rows)
    return y if last else y.movedim(-1, dim)  # type: ignore[no-any-return]


def check_axis(x: Tensor, dim: int) -> None:
    """An axis of x, or a refusal."""
    if x.dim() < 1:
        refuse_shape("x", x, "[..., n]", "pass x.reshape(1)")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ArgumentError(
            expected=f"dim from {-x.dim()} to {x.dim() - 1}, as x is {list(x.shape)}",
            received=f"dim = {dim!r}",
            remedy="name an axis of x",
        )


# ---- gradients: one definition for both executors -------------------------------------------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def backward_with(prefix: str) -> Any:
    """The gradient, by the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return getattr(torch.ops.isobit, f"{prefix}_backward")(grad, y)  # type: ignore[no-any-return]

    return backward


def register_formulas(public: str, prefix: str) -> None:
    """Shapes, gradients and refusals of one executor's operators, whose gradient needs the output alone."""
    register_operator(public, prefix, lambda x: x.new_empty(x.shape), backward_with(prefix), setup_context)
    register_operator(public, f"{prefix}_backward", lambda grad, y: y.new_empty(y.shape))


@lru_cache(maxsize=1)
def _register_native() -> None:
    register_formulas("softmax", "softmax")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def register_native() -> bool:
    """Registers the native operators' formulas, once, after their library is loaded."""
    _register_native()
    return True


@torch.library.custom_op("isobit::portable_softmax", mutates_args=())
def portable_softmax(x: Tensor) -> Tensor:
    """y over the last axis."""
    return portable.softmax(x)


@torch.library.custom_op("isobit::portable_softmax_backward", mutates_args=())
def portable_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """dx over the last axis."""
    return portable.softmax_backward(grad, y)


register_formulas("softmax", "portable_softmax")
