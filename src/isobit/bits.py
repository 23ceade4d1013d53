"""Raw-bit equality, first difference, ULP distance and digests of tensors, state dicts and modules."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from blake3 import blake3

from isobit.records import Difference

Digestible = torch.Tensor | Mapping[str, torch.Tensor] | torch.nn.Module

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as whole numbers, one per element (a complex number is two)."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().view(_INTEGER[plain.element_size()])


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree: -0.0 is not +0.0, a NaN equals the same NaN."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(as_integers(left), as_integers(right))
    )


def first_difference(left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """Where two tensors part, or None."""
    if left.dtype != right.dtype:
        return Difference("dtype", str(left.dtype), str(right.dtype))
    if left.shape != right.shape:
        return Difference("shape", str(list(left.shape)), str(list(right.shape)))
    a, b = as_integers(left), as_integers(right)
    wrong = (a != b).reshape(-1)
    count = int(wrong.sum())
    if not count:
        return None
    at = int(wrong.to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), a.shape))
    ulps = None
    if left.is_floating_point():
        ulps = ulp_distance(left.detach()[index], right.detach()[index])
    return Difference("bits", _hex(a[index]), _hex(b[index]), index, ulps, count, a.numel())


def ulp_distance(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """Representable values between two scalars of one floating dtype; None where one is a NaN."""
    if bool(left.isnan()) or bool(right.isnan()):
        return None
    return abs(_rank(left) - _rank(right))


def digest(value: Digestible) -> str:
    """BLAKE3 over names, dtypes, shapes and raw bits; memory layout does not matter."""
    return _hash(value).hexdigest()[:32]


def _hash(value: Digestible) -> blake3:
    hasher = blake3()
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{list(value.shape)}".encode())
        data = as_integers(value.cpu())
        if data.numel():
            size = data.numel() * data.element_size()
            # Straight from the tensor's memory: no copy, and no need of NumPy.
            memory = (ctypes.c_char * size).from_address(data.data_ptr())
            hasher.update(memoryview(memory).cast("B"))
        return hasher
    for name in sorted(value):
        hasher.update(len(name).to_bytes(8, "little") + name.encode())
        hasher.update(_hash(value[name]).digest())
    return hasher


def _rank(value: torch.Tensor) -> int:
    size = value.element_size()
    bits = int(as_integers(value.reshape(1))[0]) & ((1 << 8 * size) - 1)
    sign = 1 << (8 * size - 1)
    return sign - bits if bits & sign else bits


def _hex(bits: torch.Tensor) -> str:
    size = bits.element_size()
    return f"0x{int(bits) & ((1 << 8 * size) - 1):0{2 * size}x}"
