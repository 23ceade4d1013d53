"""Raw-bit equality, first difference, ULP distance and digests of tensors, state dicts and modules."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from blake3 import blake3
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from isobit.errors import ArgumentError
from isobit.foundation.records import Difference

__all__ = ["as_integers", "digest", "equal", "first_difference", "ulp_distance"]

Digestible = torch.Tensor | Mapping[str, torch.Tensor] | torch.nn.Module

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def __dir__() -> list[str]:
    return __all__


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers, one per element (two per complex number).

    Args:
        tensor: A tensor of any dtype.

    Returns:
        A tensor of uint8, int16, int32 or int64 with the same bits.

    Example:
        >>> isobit.bits.as_integers(torch.tensor([1.0, -0.0]))
        tensor([ 1065353216, -2147483648], dtype=torch.int32)
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().view(_INTEGER[plain.element_size()])


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether dtype, shape and every bit are equal: -0.0 is not +0.0, and a NaN equals the same NaN.

    Args:
        left: A tensor.
        right: A tensor.

    Returns:
        True if the two are the same, bit for bit.

    Example:
        >>> isobit.bits.equal(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(as_integers(left), as_integers(right))
    )


def first_difference(left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """Return the first element at which two tensors differ, or None if they are equal bit for bit.

    Args:
        left: A tensor.
        right: A tensor.

    Returns:
        A record with the index, both bit patterns, the distance in ULPs and the number of differing elements; or with
        the dtypes or shapes, where these differ.

    Example:
        >>> found = isobit.bits.first_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
        >>> found.index, found.ulps
        ((1,), 2097152)
    """
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
    """Return the number of representable steps between two scalars of one floating dtype.

    Args:
        left: A scalar tensor.
        right: A scalar tensor of the same dtype.

    Returns:
        The distance in ULPs; None if either is a NaN.

    Example:
        >>> one = torch.tensor(1.0)
        >>> isobit.bits.ulp_distance(one, torch.nextafter(one, torch.tensor(2.0)))
        1
    """
    if bool(left.isnan()) or bool(right.isnan()):
        return None
    return abs(_rank(left) - _rank(right))


def digest(value: Digestible) -> str:
    """Return a BLAKE3 digest of names, dtypes, shapes and raw bits; strides do not matter.

    Args:
        value: A tensor, a mapping from names to tensors, or a module.

    Returns:
        32 hexadecimal digits.

    Raises:
        ArgumentError: If a tensor has no memory of its own, as a DTensor has none.

    Example:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> isobit.bits.digest(x.t()) == isobit.bits.digest(x.t().contiguous())
        True
    """
    return _hash(value).hexdigest()[:32]


def _hash(value: Digestible) -> blake3:
    hasher = blake3()
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{list(value.shape)}".encode())
        data = as_integers(value.cpu())
        if data.numel():
            if is_traceable_wrapper_subclass(data) or not data.data_ptr():
                raise ArgumentError(
                    expected="a tensor with memory of its own",
                    received=f"a {type(value).__name__} on {value.device}, which has none",
                    remedy="take the tensor inside: .to_local() of a DTensor, .wait() of a collective's result",
                )
            size = data.numel() * data.element_size()
            # Reads the tensor's memory directly: no copy, and NumPy is not needed.
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
