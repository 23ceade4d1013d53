"""Widening to the accumulation dtype, rounding a result once, and the one NaN that results may hold."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of arithmetic: fp64 stays fp64, everything else becomes fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def widen_rows(tensor: Tensor) -> Tensor:
    """Return the tensor as rows [R, n] in the dtype of arithmetic."""
    return widen(tensor.reshape(-1, tensor.shape[-1]))


def round_once(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a sum to the result's dtype and replace every NaN by the one NaN of isobit's results.

    Code that merges sums of isobit's operators must round with this function and not with `Tensor.to`: torch writes
    the bf16 NaN 0xffff in vectors and 0x7fc0 in their tails, and keeps the sign and payload of an fp32 NaN, which
    depend on the order of operands.
    """
    return one_nan(total.to(dtype))


def one_nan(tensor: Tensor) -> Tensor:
    """Replace every NaN by the positive quiet NaN: which sign and payload survive depends on the order of operands."""
    return torch.where(tensor.isnan(), torch.nan, tensor)


def settle_nans(tensor: Tensor) -> Tensor:
    """Replace every NaN in place by the one of isobit's results (0x7fc00000, 0x7fc0, 0x7e00)."""
    return torch.nan_to_num(tensor, nan=torch.nan, posinf=torch.inf, neginf=-torch.inf, out=tensor)
