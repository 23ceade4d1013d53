"""Sums inside functions of rows: the squares of a norm, the denominator of a softmax. No term is negative."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.reveal.targets.tensor_target import TensorTarget

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
