"""The portable executor of causal_conv: a chain over the taps in plain torch operations.

Every product and every sum is rounded, and none is fused, so that elementwise operations of torch have one result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, wide_values
from isobit.ops.portable.sums import round_once, widen
from isobit.order.samples import Samples


def causal_conv(x: Tensor, weight: Tensor, samples: Samples, before: Tensor | None) -> Tensor:
    """Return y [..., C]; rows of no sample are zeros.

    Args:
        x: [..., C].
        weight: [C, 1, K].
        samples: The rows of each sample.
        before: [samples, K - 1, C], the rows before each sample's first; zeros where it is None.
    """
    rows, taps = widen(x.reshape(-1, x.shape[-1])), widen(weight)[:, 0].t()
    y = torch.zeros_like(rows)
    for index, (start, length) in enumerate(samples.spans):
        if length:
            past = None if before is None else widen(before[index])
            window = behind(rows[start : start + length], past, len(taps))
            y[start : start + length] = chain(window, taps, length)
    return round_once(y, x.dtype).reshape(x.shape)


def behind(rows: Tensor, before: Tensor | None, taps: int) -> Tensor:
    """Return the rows of a sample behind the taps - 1 rows that come before them."""
    first = rows.new_zeros(taps - 1, rows.shape[1]) if before is None else before
    return torch.cat((first, rows))


def chain(window: Tensor, taps: Tensor, length: int) -> Tensor:
    """Return the sum over taps [K, C], the first of them with the first row: each product and sum is rounded."""
    total = window[:length] * taps[0]
    for tap in range(1, len(taps)):
        total = total + window[tap : tap + length] * taps[tap]
    return total


def causal_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, samples: Samples, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return dx, and the terms [..., C · K] whose sums over the rows of the samples are the gradient of weight."""
    rows, upstream = (widen(t.reshape(-1, t.shape[-1])) for t in (x, grad))
    taps = widen(weight)[:, 0].t()
    count, channels = taps.shape
    dx, terms = torch.zeros_like(rows), rows.new_zeros(len(rows), channels, count)
    for index, (start, length) in enumerate(samples.spans):
        if not length:
            continue
        here = slice(start, start + length)
        past = None if before is None else widen(before[index])
        window = behind(rows[here], past, count)
        # The output that reads a row through the first tap is the last one that reads it.
        later = torch.cat((upstream[here], rows.new_zeros(count - 1, channels)))
        dx[here] = chain(later, taps.flip(0), length)
        for tap in range(count):
            terms[here, :, tap] = upstream[here] * window[tap : tap + length]
    return round_once(dx, x.dtype).reshape(x.shape), terms.reshape(*x.shape[:-1], -1)


# Compare a GPU's convolution with this one, bit for bit; on the CPU there is no other.

LENGTHS, CHANNELS, TAPS = (5, 0, 2), 19, 4


def difference_on_gpu(dtype: torch.dtype, call: Call) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(TAPS)
    samples = Samples(((1, LENGTHS[0]), (8, LENGTHS[1]), (6, LENGTHS[2])), 9, 0, 3)
    x, grad = (wide_values((samples.rows, CHANNELS), dtype, generator) for _ in range(2))
    weight = wide_values((CHANNELS, 1, TAPS), dtype, generator)
    cached = wide_values((len(LENGTHS), TAPS - 1, CHANNELS), dtype, generator)
    spans = torch.tensor(samples.spans, device="cpu")
    for before in (None, cached):
        found = call("causal_conv", x, weight, spans, before)
        if not bits.equal(found, causal_conv(x, weight, samples, before)):
            return "causal_conv"
        made = call("causal_conv_backward", grad, x, weight, spans, before)
        wanted = causal_conv_backward(grad, x, weight, samples, before)
        if not all(bits.equal(a, b) for a, b in zip(made, wanted, strict=True)):
            return "causal_conv's gradient"
    return None
