"""Sums inside row functions: the squares of a norm, the denominator of a softmax. Their terms cannot be negative."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.reveal.targets.tensor_target import TensorTarget

NOTHING = -1e4  # its exponential is zero in every dtype


def softmax(
    k: int,
    m: int = 1,
    dtype: torch.dtype = torch.float32,
    function: Callable[[Tensor, int], Tensor] = F.softmax,
) -> TensorTarget:
    """The denominator of a row of k, m rows in a call; the large element's result is read."""
    x = torch.zeros(m, k, dtype=dtype)
    name = f"{function.__name__} {m}×{k}, denominator"
    return TensorTarget(name, x, lambda: function(x, -1), "positive", encode=log_or_nothing)


def log_softmax(
    k: int,
    m: int = 1,
    dtype: torch.dtype = torch.float32,
    function: Callable[[Tensor, int], Tensor] = F.log_softmax,
) -> TensorTarget:
    """The same sum; its logarithm shows the last place in narrow outputs too."""
    return softmax(k, m, dtype, function)


def rms_norm(
    k: int,
    m: int = 1,
    dtype: torch.dtype = torch.float32,
    function: Callable[..., Tensor] = F.rms_norm,
) -> TensorTarget:
    """The sum of the squares of a row of k, m rows in a call; the large element's result is read."""
    x = torch.zeros(m, k, dtype=dtype)
    eps = 2.0**-126  # too small to be seen beside the sum

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
    """The same of k elements and ten more, which are not probed and make the mean exactly zero.

    Of two small elements the second is negated; one alone is balanced by two halves of it, the large one by eighths.
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
    return math.log(value) if value else NOTHING


def _root(value: float) -> float:
    """A root on a grid where all sums that a mean needs are exact in fp32."""
    return round(math.sqrt(value) * 2.0**22) * 2.0**-22
