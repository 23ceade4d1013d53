"""log by the chain of operations of csrc/logarithm.h, in plain torch operations: each value has one result."""

from __future__ import annotations

import torch
from torch import Tensor

ROOT_HALF = float.fromhex("0x1.6a09e6p-1")
OCTAVE, OCTAVE_REST = (
    float.fromhex("0x1.63p-1"),
    float.fromhex("-0x1.bd0106p-13"),
)  # ln 2 in two parts
P = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def log_positive(x: Tensor) -> Tensor:
    """Of fp32 values that are at least 2^-126; fp64, which serves gradcheck, takes torch's."""
    if x.dtype == torch.float64:
        return torch.log(x)
    bits = x.contiguous().view(torch.int32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    small = mantissa < ROOT_HALF
    whole = (((bits >> 23) & 0x1FF) - 126).float()
    n = torch.where(small, whole - 1.0, whole)
    f = torch.where(small, mantissa + mantissa, mantissa) - 1.0
    z = f * f
    p = f * P[0] + P[1]
    for coefficient in P[2:]:
        p = p * f + coefficient
    rest = ((p * f) * z + n * OCTAVE_REST) - 0.5 * z
    return torch.where(x - x == 0, (f + rest) + n * OCTAVE, x)
