"""isobit.nn.RMSNorm and isobit.nn.LayerNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.share import accumulation_dtype
from isobit.order.samples import Samples


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm over one axis, with a weight, that computes isobit.rms_norm.

    Raises:
        ArgumentError: If normalized_shape has more than one axis, or elementwise_affine is False.

    Example:
        >>> norm = isobit.nn.RMSNorm(64)
        >>> x = torch.randn(8, 64)
        >>> torch.equal(norm(x)[:1], norm(x[:1]))
        True
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        check_one_axis(self)

    def forward(self, x: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute isobit.rms_norm(x, weight, eps); an eps of None is that of the accumulation dtype, as in torch."""
        eps = torch.finfo(accumulation_dtype(x.dtype)).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, samples=samples)


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm over one axis, with a weight, that computes isobit.layer_norm.

    Raises:
        ArgumentError: If normalized_shape has more than one axis, or elementwise_affine is False.

    Example:
        >>> norm = isobit.nn.LayerNorm(64)
        >>> x = torch.randn(8, 64)
        >>> torch.equal(norm(x)[:1], norm(x[:1]))
        True
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        check_one_axis(self)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute isobit.layer_norm(input, weight, bias, eps)."""
        return layer_norm(input, self.weight, self.bias, self.eps, samples=samples)


def check_one_axis(norm: torch.nn.RMSNorm | torch.nn.LayerNorm) -> None:
    """Raise unless a norm has a weight of one axis."""
    if len(norm.normalized_shape) != 1 or not norm.elementwise_affine:
        raise ArgumentError(
            expected="a norm over the last axis with elementwise_affine=True",
            received=f"normalized_shape={norm.normalized_shape}, elementwise_affine={norm.elementwise_affine}",
            remedy="flatten the normalized axes into one; to train no weight, call norm.requires_grad_(False)",
        )
