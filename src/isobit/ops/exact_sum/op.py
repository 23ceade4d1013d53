"""The exact sum: the public function, its torch operators, their gradient, and states that ranks can merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.foundation.machine import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.arguments import WITH_GPU, check_tensors
from isobit.ops.device_tables import refuse_in_capture
from isobit.ops.exact_sum import portable
from isobit.ops.gpu import executors
from isobit.ops.portable.sums import round_once
from isobit.ops.registration import declare, launch, portable_operator, register_operator


def exact_sum(x: Tensor) -> Tensor:
    """Sum all elements exactly and round once, so that no order of addition is involved.

    Args:
        x: Any shape, in fp32, bf16, fp16 or fp64.

    Returns:
        A scalar in fp32, or in fp64 for fp64. A NaN, or infinities of both signs, give NaN; infinities of one sign give
        that infinity; an empty sum is +0.

    Raises:
        ArgumentError: If x is not a supported tensor.

    Example:
        >>> isobit.exact_sum(torch.tensor([1.0, 2.0**60, -(2.0**60)]))
        tensor(1.)
    """
    check_tensors(WITH_GPU, x=x)
    return launch("exact_sum", (x.numel(),), x)  # type: ignore[no-any-return]


def exact_state_anywhere(tensors: Sequence[Tensor], squared: bool = False) -> Tensor:
    """Return `exact_state` of tensors on the CPU or on a GPU; the digits of the state are on the CPU.

    A GPU adds the digits of each tensor. The host adds those of the tensors, which are a few integers.
    """
    tensors = list(tensors)
    on_gpu = [t for t in tensors if isinstance(t, Tensor) and executors.is_asked_for((t,))]
    if not on_gpu:
        return exact_state(tensors, squared)
    refuse_in_capture("the exact sum of a norm, whose digits the host adds")
    others = [t for t in tensors if not any(t is known for known in on_gpu)]
    states = [exact_state(others, squared).tolist()] if others else []
    on_device: dict[torch.device, list[Tensor]] = {}
    for tensor in on_gpu:
        check_tensors(WITH_GPU, tensor=tensor)
        values = tensor.detach().reshape(-1)
        for at in range(0, max(len(values), 1), portable.MOST_AT_ONCE):
            part = values[at : at + portable.MOST_AT_ONCE]
            found = launch("exact_state", (part.numel(),), part, squared)
            on_device.setdefault(part.device, []).append(found)
    for found in on_device.values():  # the host waits once for each GPU
        states += torch.stack(found).tolist()
    total = [sum(column) for column in zip(*states, strict=True)]
    digits, specials = total[: portable.DIGITS], total[portable.DIGITS :]
    whole = sum(digit << 32 * at for at, digit in enumerate(digits))
    return torch.tensor([*portable.to_digits(whole), *specials], dtype=torch.int64, device="cpu")


def exact_state(tensors: Sequence[Tensor], squared: bool = False) -> Tensor:
    """Return the exact sum over several tensors as int64 digits; the sum of two states is the state of both."""
    dispatch.refuse_chosen()
    for tensor in tensors:
        check_tensors(tensor=tensor)
        if tensor.dtype == torch.float64:
            raise ArgumentError(
                expected="fp32, bf16 or fp16, whose squares fit the digits",
                received="torch.float64",
                remedy="convert with .to(torch.float32)",
            )
    if not tensors:
        return torch.zeros(portable.STATE_SIZE, dtype=torch.int64, device="cpu")
    plain = [t.detach() for t in tensors]
    if dispatch.has_native():
        return torch.ops.isobit.exact_state(plain, squared)  # type: ignore[no-any-return]
    return keeping_subnormals(portable.state)(plain, squared)


def round_state(state: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the value of a state, or of a sum of states, rounded once to fp32 or fp64; on the CPU."""
    if dispatch.has_native():
        return torch.ops.isobit.exact_round(state, dtype)  # type: ignore[no-any-return]
    return keeping_subnormals(portable.round_state)(state, dtype)


def fake_sum(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def fake_backward(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return grad.new_empty(shape, dtype=dtype)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    (x,) = inputs
    ctx.shape, ctx.dtype = x.shape, x.dtype


def backward_with(prefix: str) -> Any:
    """Return the backward: every element has the gradient of the sum, rounded once."""
    name = f"{'triton' if prefix.startswith('triton') else 'portable'}_exact_sum_backward"

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return getattr(torch.ops.isobit, name)(grad, ctx.shape, ctx.dtype)  # type: ignore[no-any-return]

    return backward


def register_state(prefix: str) -> None:
    """Register the shape of the Triton executor's state."""
    register_operator(
        "exact_sum", prefix, lambda x, squared: x.new_empty(portable.STATE_SIZE, dtype=torch.int64)
    )


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators; only the native one has operators for states."""
    register_operator("exact_sum", prefix, fake_sum, backward_with(prefix), setup_context)
    if prefix != "exact_sum":  # one gradient serves both executors of the CPU
        register_operator("exact_sum", f"{prefix}_backward", fake_backward)
        return
    state_size = portable.STATE_SIZE
    torch.library.register_fake(
        "isobit::exact_state",
        lambda tensors, squared: tensors[0].new_empty(state_size, dtype=torch.int64),
    )
    torch.library.register_fake(
        "isobit::exact_round", lambda state, dtype: state.new_empty((), dtype=dtype)
    )


@portable_operator("portable_exact_sum")
def portable_exact_sum(x: Tensor) -> Tensor:
    return portable.exact_sum(x)


@portable_operator("portable_exact_sum_backward")
def portable_exact_sum_backward(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return dx; an operator, since the gradient of torch's expand would be a sum without a defined order."""
    return round_once(grad, dtype).expand(shape).contiguous()


declare("exact_sum", register_formulas, triton="isobit.ops.exact_sum.triton")
executors.declare_triton("exact_state", register_state, "isobit.ops.exact_sum.triton_state")
