"""The operators of an optimizer's step: AdamW, and the scaling of gradients. Neither has a gradient of its own.

The native kernels change all tensors in place, in one parallel region, and Triton kernels those of one parameter. The
portable executor returns new tensors, which are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from isobit.foundation import launches
from isobit.ops import dispatch
from isobit.ops.adamw import portable
from isobit.ops.adamw.portable import Numbers
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.gpu.executors import declare_triton, is_asked_for
from isobit.ops.registration import declare, launch, portable_operator, register_operator


class Update(NamedTuple):
    """What one parameter's step needs: four tensors of one shape, dtype and device, and its numbers."""

    p: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    numbers: Numbers

    def check(self) -> None:
        """Raise ArgumentError unless the tensors are supported and alike."""
        p, grad, first, second, _ = self
        check_tensors(WITH_GPU, parameter=p, gradient=grad, mean=first, squares=second)
        for name, tensor in (("gradient", grad), ("mean", first), ("squares", second)):
            if tensor.shape != p.shape:
                refuse_shape(
                    name, tensor, str(list(p.shape)), "load a state dict of the same model"
                )


def adamw_(updates: Sequence[Update], factor: float = 1.0) -> None:
    """Step parameters and their moments in place; `Update.check` has passed.

    Args:
        updates: One per parameter.
        factor: What gradients are multiplied by as they are read, as `scale_` would; they are not changed.

    Raises:
        UnsupportedError: If a dtype has no Triton executor and its tensors are on a GPU.
    """
    native = [update for update in updates if is_native(update.p)]
    if native:
        p, grad, first, second, numbers = zip(*native, strict=True)
        for each in p if launches.is_recording() else ():
            launches.record("adamw", "native", each.dtype, (each.numel(),))
        given = [number for each in numbers for number in each]
        torch.ops.isobit.adamw_(p, grad, first, second, given, factor)
    for update in updates:
        if is_native(update.p):
            continue
        *tensors, numbers = update
        weight, gradient, *moments = (t.detach() for t in tensors)
        if writes_in_place(weight, gradient, *moments):
            launch("adamw_", (weight.numel(),), weight, gradient, *moments, *numbers, factor)
            mark_written(update.p, update.first, update.second)
            continue
        if factor != 1.0:
            gradient = launch("scaled", (gradient.numel(),), gradient, factor)
        found = launch("adamw", (weight.numel(),), weight, gradient, *moments, *numbers)
        for old, new in zip((update.p, update.first, update.second), found, strict=True):
            old.copy_(new)


def writes_in_place(*tensors: Tensor) -> bool:
    """Return whether Triton kernels may write the results over tensors: contiguous ones that share no memory."""
    if not is_asked_for(tensors) or not all(t.is_contiguous() for t in tensors):
        return False
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.numel())
    return all(end <= start for (_, end), (start, _) in pairwise(places))


def mark_written(*tensors: Tensor) -> None:
    """Count a write, as torch does for its own operators, so that autograd sees a saved tensor that changed."""
    increment_version([t for t in tensors if not t.is_inference()])


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors in place by a factor, which is used as fp32; each product is rounded once.

    Raises:
        ArgumentError: If a tensor is not supported.
    """
    for tensor in tensors:
        check_tensors(WITH_GPU, gradient=tensor)
    native = [tensor for tensor in tensors if is_native(tensor)]
    if native:
        torch.ops.isobit.scale_(native, factor)
    for tensor in tensors:
        if is_native(tensor):
            continue
        if writes_in_place(tensor):
            launch("scaled_", (tensor.numel(),), tensor.detach(), factor)
            mark_written(tensor)
        else:
            tensor.copy_(launch("scaled", (tensor.numel(),), tensor.detach(), factor))


def is_native(tensor: Tensor) -> bool:
    """Return whether the native kernels serve a tensor."""
    return tensor.is_cpu and not is_asked_for((tensor,)) and dispatch.is_native(tensor.dtype)


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


def register_in_place() -> None:
    """Register the native operators for tensors without memory."""
    torch.library.register_fake(
        "isobit::adamw_", lambda p, grad, first, second, numbers, factor=1.0: None
    )
    torch.library.register_fake("isobit::scale_", lambda x, factor: None)


def register_triton_in_place(prefix: str) -> None:
    """Register a Triton operator that writes its arguments, for tensors without memory."""
    torch.library.register_fake(f"isobit::{prefix}", lambda *arguments: None)


@portable_operator("portable_adamw")
def portable_adamw(
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    decay: float,
    keep_mean: float,
    add_mean: float,
    keep_square: float,
    add_square: float,
    spread: float,
    eps: float,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:
    numbers = Numbers(decay, keep_mean, add_mean, keep_square, add_square, spread, eps, rate)
    return portable.adamw(p, grad, first, second, numbers)


@portable_operator("portable_scaled")
def portable_scaled(x: Tensor, factor: float) -> Tensor:
    return portable.scaled(x, factor)


declare("adamw", register_step, native=False, triton="isobit.ops.adamw.triton")
declare("scaled", register_scaled, native=False, triton="isobit.ops.adamw.triton")
for in_place in ("adamw_", "scaled_"):
    declare_triton(in_place, register_triton_in_place, "isobit.ops.adamw.triton")
dispatch.when_attested(register_in_place)
