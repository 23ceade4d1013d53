"""Sums of one tensor: over an axis, as a mean, and of any callable that sums a vector."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isobit.errors import RevealError
from isobit.targets.tensor_target import TensorTarget


def of(function: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype = torch.float32) -> TensorTarget:
    """Any callable that takes n terms as a vector and returns their sum."""
    terms = torch.zeros(1, n, dtype=dtype)
    name = getattr(function, "__name__", type(function).__name__)

    def run() -> Tensor:
        try:
            found = function(terms[0].clone())  # it may write to what it is given
            if not isinstance(found, Tensor | float | int):
                raise TypeError(f"it returned {type(found).__name__}")
            out = torch.as_tensor(found).reshape(1)
            if out.is_complex():
                raise TypeError("it returned a complex number")
            return out if out.is_floating_point() else out.to(torch.float64)
        except (Exception, SystemExit) as error:  # whatever a stranger's function raises
            raise RevealError(
                expected=f"{name} to take a vector of {n} {dtype} terms and return their sum",
                received=f"{type(error).__name__}: {error}",
                remedy="wrap it in a function that does",
            ) from error

    return TensorTarget(f"{name} of {n}", terms, run)


def sum(
    k: int, m: int = 1, dtype: torch.dtype = torch.float32, axis: int = -1, mean: bool = False
) -> TensorTarget:
    """`torch.sum` (or `mean`) over `k` terms, `m` of them side by side; axis 0 sums down the columns of [k, m]."""
    if axis in (-1, 1):
        whole = torch.zeros(m, k, dtype=dtype)
        terms = whole
    else:
        whole = torch.zeros(k, m, dtype=dtype)
        terms = whole.t()
    function = torch.mean if mean else torch.sum
    name = f"{function.__name__} {tuple(whole.shape)} over axis {axis}"
    return TensorTarget(name, terms, lambda: function(whole, axis), divided_by=k if mean else 1)


def mean(k: int, m: int = 1, dtype: torch.dtype = torch.float32, axis: int = -1) -> TensorTarget:
    """`torch.mean`: the sum, then a division."""
    return sum(k, m, dtype, axis, mean=True)
