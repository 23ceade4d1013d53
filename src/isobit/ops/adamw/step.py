"""The operators of an optimizer's step: AdamW, and the scaling of gradients. Neither has a gradient of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import EngineError
from isobit.ops.adamw import portable
from isobit.ops.adamw.portable import Numbers
from isobit.ops.arguments import WITH_GPU, check_tensors
from isobit.ops.gpu.executors import is_asked_for
from isobit.ops.registration import declare, launch, portable_operator, register_operator


def adamw(
    p: Tensor, grad: Tensor, first: Tensor, second: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameter, the mean and the mean of squares after a step; all have one shape and one dtype.

    Raises:
        EngineError: If tensors are on a GPU, and the CPU's step has other bits because of torch's square root.
        ArgumentError: If dtypes or devices differ, or are not supported.
        UnsupportedError: If the dtype has no Triton executor and tensors are on a GPU.
    """
    check_tensors(WITH_GPU, parameter=p, gradient=grad, mean=first, squares=second)
    if is_asked_for((p,)):
        refuse_inexact_roots(p.dtype)
    given = (p.detach(), grad.detach(), first, second, *numbers)
    return launch("adamw", (p.numel(),), *given)  # type: ignore[no-any-return]


def refuse_inexact_roots(dtype: torch.dtype) -> None:
    """Raise if torch's square root on this CPU is not correctly rounded: a GPU's step could not have the CPU's bits."""
    wrong, tried = portable.inexact_roots(dtype)
    if wrong:
        raise EngineError(
            expected=f"AdamW in {dtype} on a GPU where torch's square roots on the CPU are correctly rounded",
            received=f"{wrong} of {tried} that are not, so that the CPU's step has other bits",
            remedy="keep the parameters that AdamW updates on the CPU, or in bfloat16 or float16",
        )


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x · factor, rounded once; the factor is used as fp32."""
    check_tensors(WITH_GPU, gradient=x)
    return launch("scaled", (x.numel(),), x.detach(), factor)  # type: ignore[no-any-return]


def fake_step(
    p: Tensor, grad: Tensor, first: Tensor, second: Tensor, *numbers: float
) -> tuple[Tensor, Tensor, Tensor]:
    return p.new_empty(p.shape), p.new_empty(p.shape), p.new_empty(p.shape)


def register_step(prefix: str) -> None:
    """Register the shapes of one executor's operator."""
    register_operator("optim.AdamW", prefix, fake_step)


def register_scaled(prefix: str) -> None:
    """Register the shapes of one executor's operator."""
    register_operator("optim.clip_grad_norm_", prefix, lambda x, factor: x.new_empty(x.shape))


@portable_operator("portable_adamw")
def portable_adamw(
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    decay: float,
    weight: float,
    keep: float,
    added: float,
    root: float,
    eps: float,
    size: float,
) -> tuple[Tensor, Tensor, Tensor]:
    numbers = Numbers(decay, weight, keep, added, root, eps, size)
    return portable.adamw(p, grad, first, second, numbers)


@portable_operator("portable_scaled")
def portable_scaled(x: Tensor, factor: float) -> Tensor:
    return portable.scaled(x, factor)


declare("adamw", register_step, native=False, triton="isobit.ops.adamw.triton")
declare("scaled", register_scaled, native=False, triton="isobit.ops.adamw.triton")
