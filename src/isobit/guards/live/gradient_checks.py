"""Norms of many tensors in one pass, and which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.guards.live.replica import is_finite
from isobit.parallel.tensor.shard import is_dtensor

SAMPLED = 4  # gradients that are looked at in a step that does not read all
SAMPLED_ELEMENTS = 2**12  # of each
NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a gradient or parameter: the local shard, the values of a sparse tensor."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return tensor


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the 2-norm of each tensor's local part, read from the device at once.

    Args:
        tensors: Of any devices and dtypes. Norms of 16-bit tensors are computed in fp32.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    parts = [local_part(tensor) for tensor in tensors]
    for at, part in enumerate(parts):
        groups.setdefault((part.device, part.dtype), []).append(at)
    found = [0.0] * len(parts)
    for (_, dtype), places in groups.items():
        if dtype not in NORM_DTYPES:  # complex and 8 bits
            plain = [parts[at].abs() if dtype.is_complex else parts[at].float() for at in places]
            norms = [torch.linalg.vector_norm(part) for part in plain]
        else:
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            norms = list(torch._foreach_norm([parts[at] for at in places], 2, dtype=wide))
        for at, norm in zip(places, torch.stack(norms).tolist(), strict=True):
            found[at] = norm
    return found


def spread_sample(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a few parameters, evenly spread over the model. Their gradients are dense."""
    dense = [p for p in parameters if p.grad is not None and p.grad.layout == torch.strided]
    stride = max(1, -(-len(dense) // SAMPLED))
    return dense[::stride]


def is_sample_finite(parameters: Sequence[Tensor]) -> bool:
    """Return whether the first elements of these parameters' gradients are finite.

    Args:
        parameters: At most SAMPLED; those without a gradient are passed over.
    """
    parts = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        part = grad if type(grad) is Tensor else local_part(grad)
        parts.append(
            part if part.numel() <= SAMPLED_ELEMENTS else part.reshape(-1)[:SAMPLED_ELEMENTS]
        )
    # A sum that is not finite may be an overflow: the caller then reads everything.
    return all(map(math.isfinite, norms_of(parts)))


def nonfinite_places(tensors: Sequence[Tensor], norms: Sequence[float]) -> list[int]:
    """Return which tensors are not finite. A norm can overflow while its tensor is finite, so those are read again."""
    return [
        at
        for at, norm in enumerate(norms)
        if not math.isfinite(norm) and not is_finite(local_part(tensors[at]))
    ]


def wide_norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the same norms in fp64, for finite tensors whose squares overflow fp32: a gradient of 1e35 has a norm."""
    return [float(torch.linalg.vector_norm(local_part(t), dtype=torch.float64)) for t in tensors]


def total_of(norms: Sequence[float]) -> float:
    """Return the norm of all tensors together."""
    return math.hypot(*norms) if norms else 0.0


def describe_nonfinite(tensor: Tensor) -> str:
    """Return how many elements are not finite, and the first of them."""
    part = local_part(tensor)
    wrong = ~part.isfinite()
    first = wrong.reshape(-1).nonzero()[0, 0]
    index = [int(i) for i in torch.unravel_index(first, part.shape)] if part.ndim else []
    value = part.reshape(-1)[first].item()
    return (
        f"{int(wrong.sum())} of {part.numel()} elements are not finite, first at {index}: {value}"
    )
