"""Compare the values of two entries: bits, ulps and the largest difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from isobit import bits
from isobit.foundation.records import Difference


@dataclass(frozen=True)
class Verdict:
    """How two values differ; `what` is empty if they do not.

    Attributes:
        what: "", "bits", "shape", "dtype", "value" or "outputs".
        detail: how they differ, in words.
        shortened: whether only the common rows were compared.
    """

    what: str = ""
    detail: str = ""
    difference: Difference | None = None
    ulps: int | None = None
    largest: float | None = None
    shortened: bool = False


def compare_values(left: Any, right: Any, common_rows: bool) -> Verdict:
    """Compare two tensors bit by bit, or two plain values.

    Args:
        left: A tensor or a plain value.
        right: The same of the other run.
        common_rows: Whether to compare what both have, if one tensor is longer along one axis.

    Returns:
        How they differ.

    Example:
        >>> from isobit.comparing.dumps.values import compare_values
        >>> compare_values(torch.ones(1, 2), torch.ones(8, 2), common_rows=False).detail
        'shape [1, 2] and [8, 2]: the left may be the first 1 of 8 rows of the right'
        >>> compare_values(torch.ones(1, 2), torch.ones(8, 2), common_rows=True).what
        ''
    """
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        if type(left) is type(right) and repr(left) == repr(right):
            return Verdict()
        return Verdict("value", f"{_short(left)} and {_short(right)}")
    left, right = _plain(left), _plain(right)
    shortened = False
    if left.shape != right.shape:
        axis = longer_axis(tuple(left.shape), tuple(right.shape))
        if axis is None or not common_rows:
            return Verdict("shape", describe_shapes(tuple(left.shape), tuple(right.shape)))
        rows = min(left.shape[axis], right.shape[axis])
        left, right = left.narrow(axis, 0, rows), right.narrow(axis, 0, rows)
        shortened = True
    if left.dtype != right.dtype:
        largest = _largest(left.reshape(-1), right.reshape(-1))
        return Verdict(
            "dtype", f"dtype {_name(left)} and {_name(right)}", None, None, largest, shortened
        )
    found = bits.first_difference(left, right)
    if found is None:
        return Verdict(shortened=shortened)
    at = _differing(left, right)
    left, right = left.reshape(-1)[at], right.reshape(-1)[at]
    return Verdict("bits", str(found), found, _ulps(left, right), _largest(left, right), shortened)


def longer_axis(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Return the axis along which one shape is longer, if it is the only one that differs."""
    if len(left) != len(right):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
    return differing[0] if len(differing) == 1 else None


def describe_shapes(left: tuple[int, ...], right: tuple[int, ...]) -> str:
    """Describe two shapes that differ, and whether one may be the first rows of the other."""
    text = f"shape {list(left)} and {list(right)}"
    axis = longer_axis(left, right)
    if axis is None:
        return text
    rows = "rows" if axis == 0 else f"along axis {axis}"
    few, many = sorted((left[axis], right[axis]))
    shorter, longer = ("left", "right") if left[axis] == few else ("right", "left")
    return f"{text}: the {shorter} may be the first {few} of {many} {rows} of the {longer}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:  # its bits cannot be viewed as integers: torch crashes
        raise TypeError("a quantized tensor has no plain values")
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg()


def _differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return flat indices of the elements that differ in any bit."""
    wrong = bits.as_integers(left) != bits.as_integers(right)
    if left.is_complex():
        wrong = wrong.any(-1)
    return wrong.reshape(-1).nonzero().reshape(-1)


def _largest(left: torch.Tensor, right: torch.Tensor) -> float | None:
    """Return the largest |difference|, or None if it is not finite."""
    if not left.numel():
        return None
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    found = float((left.to(wide) - right.to(wide)).abs().max())
    return found if math.isfinite(found) else None


def _ulps(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """Return the largest distance in ULPs of elements that are not NaN, or None if there is none."""
    if not left.is_floating_point():
        return None
    numbers = ~(left.float().isnan() | right.float().isnan())
    left, right = left[numbers], right[numbers]
    if not left.numel():
        return None
    a, b = _steps(left), _steps(right)
    opposite = (a < 0) != (b < 0)  # only there the distance may exceed an int64
    far = a.double().abs() + b.double().abs()
    near = (a - b).abs()
    largest = [int(near[~opposite].max())] if bool((~opposite).any()) else []
    if bool(opposite.any()):
        at = int(torch.where(opposite, far, -1.0).argmax())
        largest.append(abs(int(a[at])) + abs(int(b[at])))
    return max(largest)


def _steps(values: torch.Tensor) -> torch.Tensor:
    """Return each number's place among all numbers of its dtype, 0 for both zeros."""
    found = bits.as_integers(values).to(torch.int64)
    size = values.element_size()
    if size == 8:
        return torch.where(found < 0, torch.iinfo(torch.int64).min - found, found)
    sign = 1 << (8 * size - 1)
    found = found & (2 * sign - 1)
    return torch.where(found >= sign, sign - found, found)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    text = f"a tensor of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
