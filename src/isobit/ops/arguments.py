"""Check the tensors that operators are called with, and cast them under torch.autocast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from isobit.errors import ArgumentError, UnsupportedError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICES = ("cpu", "meta")
PLAIN = (torch.Tensor, torch.nn.Parameter)  # classes that need no closer look
WITH_GPU = (*DEVICES, "cuda")  # of operators with a Triton executor; AMD's GPUs are "cuda" too


def check_tensors(devices: tuple[str, ...] = DEVICES, /, **tensors: torch.Tensor | None) -> None:
    """Raise unless all are strided tensors of one supported dtype on one of `devices`; None is skipped."""
    dtype = None
    # This runs before every call of every operator: one pass over tensors of the CPU decides, and only what is not
    # clearly supported is looked at closely.
    for tensor in tensors.values():
        if tensor is None:
            continue
        if not (
            (type(tensor) in PLAIN or (isinstance(tensor, torch.Tensor) and not is_dtensor(tensor)))
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and (tensor.dtype is dtype or (dtype is None and tensor.dtype in DTYPES))
        ):
            return check_closely(devices, tensors)
        dtype = tensor.dtype
    return None


def check_closely(devices: tuple[str, ...], tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Raise as `check_tensors` does, for tensors of any device."""
    known = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(known.values()))
    for tensor in known.values():
        if not (
            isinstance(tensor, torch.Tensor)
            and (type(tensor) in PLAIN or not is_dtensor(tensor))
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.dtype in DTYPES
            and tensor.dtype is first.dtype
            and tensor.device == first.device
            and tensor.device.type in devices
        ):
            refuse_tensors(known, devices)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def refuse_distributed(name: str, tensor: Any) -> None:
    """Raise if this is a DTensor.

    DTensor would complete sums over ranks by torch.distributed's own reductions, in their order, and `to_local()` is no
    leaf: autograd would round a gradient before ranks exchange it. So no sharding rules are registered.

    Raises:
        UnsupportedError: It is one.
    """
    if is_dtensor(tensor):
        mesh, local = tensor.device_mesh, list(tensor.to_local().shape)
        raise UnsupportedError(
            expected=f"{name} as a plain tensor: sums over the ranks of a DTensor have an order of their own",
            received=f"a DTensor {list(tensor.shape)} of {mesh.size()} ranks, {tensor.placements}, of which this rank "
            f"has {local}",
            remedy="split layers by isobit.parallel.ColwiseParallel and RowwiseParallel, models by "
            "isobit.integrations.transformers.tensor_parallel.shard, or call fully_shard after isobit.enable; clip "
            "by isobit.parallel.clip_grad_norm_; for a tensor of your own, pass to_local() or full_tensor()",
        )


def refuse_tensors(known: dict[str, torch.Tensor], devices: tuple[str, ...]) -> NoReturn:
    """Raise an ArgumentError for the first tensor that is not supported."""
    for name, tensor in known.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                expected=f"{name} to be a tensor",
                received=type(tensor).__name__,
                remedy="convert it with torch.as_tensor",
            )
        refuse_distributed(name, tensor)
        if tensor.layout != torch.strided:
            raise ArgumentError(
                expected=f"{name} with strided layout",
                received=str(tensor.layout),
                remedy=f"pass {name}.to_dense()",
            )
        if tensor.is_nested:
            raise ArgumentError(
                expected=f"{name} with one shape",
                received="a nested tensor",
                remedy=f"pass {name}.to_padded_tensor(0.0), or join its rows, and describe them by samples=",
            )
        if tensor.device.type not in devices:
            places = "the CPU or a GPU" if "cuda" in devices else "the CPU"
            raise ArgumentError(
                expected=f"{name} on {places}, where this version has kernels",
                received=f"device {tensor.device}",
                remedy=f"pass {name}.cpu()",
            )
        if tensor.dtype not in DTYPES:
            raise ArgumentError(
                expected=f"{name} of {', '.join(str(d) for d in DTYPES)}",
                received=str(tensor.dtype),
                remedy=f"convert with {name}.to(torch.float32)",
            )
    what = "dtype" if len({t.dtype for t in known.values()}) > 1 else "device"
    raise ArgumentError(
        expected=f"one {what}",
        received=", ".join(f"{name} {getattr(tensor, what)}" for name, tensor in known.items()),
        remedy=f"bring them to one {what}; nothing is converted silently",
    )


def refuse_shape(name: str, tensor: torch.Tensor, expected: str, remedy: str) -> NoReturn:
    """Raise an ArgumentError with the expected and the received shape."""
    raise ArgumentError(
        expected=f"{name} of shape {expected}", received=str(list(tensor.shape)), remedy=remedy
    )


def cast_for_autocast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Cast to the autocast dtype, as torch.autocast does with the inputs of a linear layer."""
    device = autocast_device(tensors)
    if device is None:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def widen_for_autocast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Cast to fp32 under torch.autocast, which leaves a norm's weight in fp32 and its rows in 16 bits."""
    if autocast_device(tensors) is None:
        return tensors
    return tuple(None if t is None else t.float() for t in tensors)


def autocast_device(tensors: tuple[torch.Tensor | None, ...]) -> str | None:
    """Return the device whose autocast applies to a call; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None  # without a look at the tensors: this runs before every call
    on_cpu, on_gpu = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    if any(isinstance(t, torch.Tensor) and t.is_cuda for t in tensors):
        return "cuda" if on_gpu else None
    return "cpu" if on_cpu else None


def check_softcap(softcap: float | None) -> None:
    """Raise unless a soft cap is positive and finite in fp32, or there is none."""
    if softcap is not None and not 2.0**-126 <= softcap < 2.0**127:
        raise ArgumentError(
            expected="a soft cap that fp32 holds without loss of range: at least 2^-126, below 2^127",
            received=f"softcap={softcap}",
            remedy="leave softcap out for values without a cap",
        )
