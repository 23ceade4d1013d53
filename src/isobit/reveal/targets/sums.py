"""Sums of one tensor, and sums inside functions of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.errors import RevealError, in_one_line
from isobit.reveal.targets.tensor_target import OFFSETS, TensorTarget

# Sums of one tensor: over an axis, as a mean, and of any callable that sums a vector.

PAGE = 4096  # elements: the buffer of a callable's vector begins at a multiple of them


def of(
    function: Callable[[Tensor], Any], n: int, dtype: torch.dtype = torch.float32, stride: int = 1
) -> TensorTarget:
    """Wrap any callable that sums a vector.

    Probes are stored at an aligned address, replays also at element offsets from it: a kernel whose order depends on
    the alignment of its pointer fails them.

    Args:
        function: takes a vector of n terms and returns their sum as a tensor of one element, a Python number or a
            NumPy number.
        n: the number of terms.
        dtype: the dtype of the vector.
        stride: the vector is every `stride`-th element of a buffer; 1 is contiguous.

    Returns:
        A target; calls raise RevealError if the function raises or returns something else.

    Example:
        >>> import math
        >>> from isobit.reveal import order, targets
        >>> print(order(targets.of(lambda x: math.fsum(x.tolist()), 5)))
        5 fused
    """
    terms = torch.zeros(1, n, dtype=dtype)
    name = getattr(function, "__name__", type(function).__name__)
    room = torch.empty(n * stride + max(OFFSETS) + PAGE, dtype=dtype)
    start = -(room.data_ptr() // room.element_size()) % PAGE

    def run(offset: int = 0) -> Tensor:
        room.fill_(math.nan)  # a read outside the vector then shows
        vector = room[start + offset : start + offset + n * stride : stride]
        vector.copy_(terms[0])  # each time: it may write to what it is given
        try:
            return _read(function(vector))
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise RevealError(
                expected=f"{name} to take a vector of {n} {dtype} terms and return their sum",
                received=f"{type(error).__name__}: {in_one_line(error)}",
                remedy="wrap it in a function that takes a vector and returns one number",
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
    """Return the result as a floating-point tensor of one element."""
    if not isinstance(found, Tensor | float | int) and not hasattr(found, "__array_interface__"):
        raise TypeError(f"it returned {type(found).__name__}")
    out = torch.as_tensor(found).reshape(1)
    if out.is_complex():
        raise TypeError("it returned a complex number")
    return out if out.is_floating_point() else out.to(torch.float64)


def sum(
    k: int, m: int = 1, dtype: torch.dtype = torch.float32, axis: int = -1, mean: bool = False
) -> TensorTarget:
    """Return `torch.sum` over k terms as a target.

    Args:
        k: the number of terms.
        m: the number of sums in the call.
        dtype: the dtype of the terms.
        axis: -1 sums the rows of [m, k], 0 the columns of [k, m].
        mean: divide by k, as `torch.mean` does.

    Returns:
        A target.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.sum(6)).n
        6
    """
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
    """Return `torch.mean` over k terms as a target: the sum, then a division.

    Args:
        k: the number of terms.
        m: the number of means in the call.
        dtype: the dtype of the terms.
        axis: -1 takes the mean of the rows of [m, k], 0 of the columns of [k, m].

    Returns:
        A target.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.mean(6)).n
        6
    """
    return sum(k, m, dtype, axis, mean=True)


# Sums inside functions of rows: the squares of a norm, the denominator of a softmax. No term is negative.

NOTHING = -1e4  # a logarithm whose exponential is zero in every dtype


def softmax(
    k: int,
    m: int = 1,
    dtype: torch.dtype = torch.float32,
    function: Callable[[Tensor, int], Tensor] = F.softmax,
) -> TensorTarget:
    """Return the denominator of a softmax over k elements as a target; the largest element's result is read.

    Args:
        k: the number of terms.
        m: the number of rows of a call.
        dtype: fp32, bf16 or fp16.
        function: computes it, with the signature of the torch function that is the default.

    Returns:
        A target; its terms cannot be negative, so its arithmetic is not probed.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.softmax(8)).n
        8
    """
    x = torch.zeros(m, k, dtype=dtype)
    name = f"{function.__name__} {m}×{k}, denominator"
    return TensorTarget(name, x, lambda: function(x, -1), "positive", encode=log_or_nothing)


def log_softmax(
    k: int,
    m: int = 1,
    dtype: torch.dtype = torch.float32,
    function: Callable[[Tensor, int], Tensor] = F.log_softmax,
) -> TensorTarget:
    """Return the denominator of a log-softmax over k elements as a target.

    The logarithm shows the last place of the sum in 16-bit outputs too.

    Args:
        k: the number of terms.
        m: the number of rows of a call.
        dtype: fp32, bf16 or fp16.
        function: computes it, with the signature of `F.log_softmax`.

    Returns:
        A target; its terms cannot be negative, so its arithmetic is not probed.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.log_softmax(8)).n
        8
    """
    return softmax(k, m, dtype, function)


def rms_norm(
    k: int,
    m: int = 1,
    dtype: torch.dtype = torch.float32,
    function: Callable[..., Tensor] = F.rms_norm,
) -> TensorTarget:
    """Return the sum of squares of an RMS norm over k elements as a target; the largest element's result is read.

    Args:
        k: the number of terms.
        m: the number of rows of a call.
        dtype: fp32, bf16 or fp16.
        function: computes it, with the signature of the torch function that is the default.

    Returns:
        A target; its terms cannot be negative, so its arithmetic is not probed.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.rms_norm(8)).n
        8
    """
    x = torch.zeros(m, k, dtype=dtype)
    eps = 2.0**-126  # too small to change the sum

    def run() -> Tensor:
        return function(x, (k,), None, eps)

    return TensorTarget(
        f"{function.__name__} {m}×{k}, sum of squares", x, run, "positive", encode=math.sqrt
    )


def layer_norm(
    k: int,
    m: int = 1,
    dtype: torch.dtype = torch.float32,
    function: Callable[..., Tensor] = F.layer_norm,
) -> TensorTarget:
    """Return the sum of squares of a layer norm over k elements and ten more as a target.

    The ten are not probed: they make the mean exactly zero. Of two small elements the second is negated; one alone is
    balanced by two halves of it, the large one by eighths.

    Args:
        k: the number of terms.
        m: the number of rows of a call.
        dtype: fp32, bf16 or fp16.
        function: computes it, with the signature of the torch function that is the default.

    Returns:
        A target; its terms cannot be negative, so its arithmetic is not probed.

    Example:
        >>> from isobit.reveal import targets
        >>> targets.layer_norm(8).n  # of the 18 elements of a row
        8
    """
    x, probed = torch.zeros(m, k + 10, dtype=dtype), torch.zeros(m, k, dtype=dtype)
    eps = 2.0**-126

    def run() -> Tensor:
        x.zero_()
        x[:, :k] = probed
        large = probed.max(-1, keepdim=True).values
        x[:, k : k + 8] = -large / 8
        small = (probed > 0) & (probed < large / 64)
        x[:, :k] = torch.where(small & (small.cumsum(-1) == 2), -probed, probed)
        alone = torch.where(small.sum(-1) == 1, (probed * small).sum(-1), 0)
        x[:, k + 8 :] = -alone.unsqueeze(-1) / 2
        return function(x, (k + 10,), None, None, eps)

    return TensorTarget(
        f"{function.__name__} {m}×{k + 10}, sum of squares", probed, run, "positive", encode=_root
    )


def log_or_nothing(value: float) -> float:
    """Return the logarithm; of 0 a number whose exponential is 0."""
    return math.log(value) if value else NOTHING


def _root(value: float) -> float:
    """Return the root on a grid where all sums of the mean are exact in fp32."""
    return round(math.sqrt(value) * 2.0**22) * 2.0**-22
