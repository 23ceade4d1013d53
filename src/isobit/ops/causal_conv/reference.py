"""The definition of isobit.causal_conv in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.order.samples import Samples


def causal_conv(
    x: Tensor, weight: Tensor, samples: Samples | None = None, before: Tensor | None = None
) -> Tensor:
    """Return the convolution of each channel with its last values, within each sample."""
    width = x.shape[-2]
    count = x.shape[:-1].numel() // width
    spans = [(i * width, width) for i in range(count)] if samples is None else samples.spans
    rows, taps = x.double().reshape(-1, x.shape[-1]), weight.double()[:, 0].t()
    kept = len(taps) - 1
    y = torch.zeros_like(rows)
    for index, (start, length) in enumerate(spans):
        past = rows.new_zeros(kept, rows.shape[1]) if before is None else before[index].double()
        window = torch.cat((past, rows[start : start + length]))
        parts = [window[i : i + length] * taps[i] for i in range(kept + 1)]
        place = torch.arange(start, start + length)
        y = y.index_put((place,), torch.stack(parts).sum(0))
    return y.reshape(x.shape)


def example_causal_conv(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    taps = torch.linspace(-1, 1, 48 * 4, dtype=torch.float32, device="cpu").reshape(48, 1, 4)
    return {"x": x, "weight": taps.to(x.dtype), "samples": Samples.packed([2, 4])}
