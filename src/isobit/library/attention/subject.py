"""isobit.attention as the subject of contracts: causal by default."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.ops.attention import op


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, **options: Any) -> Tensor:
    """Call isobit.attention, which has no default for is_causal."""
    return op.attention(q, k, v, is_causal=is_causal, **options)
