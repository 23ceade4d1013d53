"""Sums of rows over the samples of a call, for gradients whose terms an operator has computed."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear import op  # noqa: F401 (declares the operator that is called)
from isobit.ops.registration import PREFIXES, executor_of


def sum_over_samples(terms: Tensor, spans: Tensor | None, of: int) -> Tensor:
    """Return [n], the sum of terms [..., n] in the order of the samples, as linear's gradient of a bias.

    Args:
        terms: [B, T, n] or [rows, n], in the dtype of sums.
        spans: See [Note: shares of a global batch] in isobit/order/samples.py.
        of: The samples of the global batch, as there.
    """
    executor = executor_of("linear", terms.dtype, (terms,))
    operator = getattr(torch.ops.isobit, f"{PREFIXES[executor]}linear_bias_grad")
    return operator(terms.contiguous(), spans, of)  # type: ignore[no-any-return]
