"""Sums of one tensor: over an axis, as a mean, and of any callable that sums a vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import RevealError, in_one_line
from isobit.reveal.targets.tensor_target import OFFSETS, TensorTarget

PAGE = 4096  # elements: the buffer of a callable's vector begins at a multiple of them


def of(
    function: Callable[[Tensor], Any], n: int, dtype: torch.dtype = torch.float32, stride: int = 1
) -> TensorTarget:
    """Any callable that takes n terms as a vector and returns their sum as a tensor, a Python or a NumPy number.

    The vector is contiguous, or every `stride`-th element of a buffer. Probes are stored at an aligned address, replays
    also at element offsets from it: a kernel whose order follows the alignment of its pointer fails them.
    """
    terms = torch.zeros(1, n, dtype=dtype)
    name = getattr(function, "__name__", type(function).__name__)
    room = torch.empty(n * stride + max(OFFSETS) + PAGE, dtype=dtype)
    start = -(room.data_ptr() // room.element_size()) % PAGE

    def run(offset: int = 0) -> Tensor:
        room.fill_(math.nan)  # what is read beside the vector shows
        vector = room[start + offset : start + offset + n * stride : stride]
        vector.copy_(terms[0])  # each time: it may write to what it is given
        try:
            return _read(function(vector))
        except (Exception, SystemExit) as error:  # whatever a stranger's function raises
            raise RevealError(
                expected=f"{name} to take a vector of {n} {dtype} terms and return their sum",
                received=f"{type(error).__name__}: {in_one_line(error)}",
                remedy="wrap it in a function that does",
            ) from error

    offsets = ", ".join(str(offset) for offset in sorted((0, *OFFSETS)))
    stored = "contiguous" if stride == 1 else f"{stride} elements apart"
    return TensorTarget(
        f"{name} of {n}" + ("" if stride == 1 else f", stride {stride}"),
        terms,
        run,
        run_moved=run,
        storage=f"{stored}, at element offsets {offsets} from an aligned address",
    )


def _read(found: Any) -> Tensor:
    """One floating-point number, as a tensor of one element."""
    if not isinstance(found, Tensor | float | int) and not hasattr(found, "__array_interface__"):
        raise TypeError(f"it returned {type(found).__name__}")
    out = torch.as_tensor(found).reshape(1)
    if out.is_complex():
        raise TypeError("it returned a complex number")
    return out if out.is_floating_point() else out.to(torch.float64)


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
