"""The Triton executor of causal_conv: one chain over the taps per element, within the sample of its row.

x, y, grad and dx are [ROWS, C], weight is [C, K] and `before` [samples, K - 1, C], all contiguous. `table` is int64
[ROWS, 3]: the first row of the row's sample, the row after its last one, and the sample's number; a row of no sample
has an empty sample, and is zero. A row outside of its sample is a factor of +0, as in the portable executor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.device_tables import kept
from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, target_of
from isobit.ops.gpu.tiles import tile_of
from isobit.ops.portable.samples import whole_samples


@triton.jit
def read_row(
    x: tl.tensor,
    before: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    start: tl.tensor,
    sample: tl.tensor,
    inside: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
) -> tl.tensor:
    """Return x[row, column] in fp32, or of `before` where the row is before the sample's first."""
    value = tl.load(x + row * C + column, mask=inside & (row >= start), other=0.0).to(tl.float32)
    if HAS_BEFORE and K > 1:
        past = (sample * (K - 1) + (K - 1) + (row - start)) * C + column
        early = inside & (row < start)
        value = tl.where(early, tl.load(before + past, mask=early, other=0.0).to(tl.float32), value)
    return value


@triton.jit(do_not_specialize=["size"])
def convolve(
    x: tl.tensor,
    weight: tl.tensor,
    before: tl.tensor,
    table: tl.tensor,
    y: tl.tensor,
    size: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute y[t] = Σ weight[i] · x[t − K + 1 + i], the oldest row first; size is the number of elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // C, at % C
    start = tl.load(table + row * 3, mask=at < size, other=0)
    stop = tl.load(table + row * 3 + 1, mask=at < size, other=0)
    sample = tl.load(table + row * 3 + 2, mask=at < size, other=0)
    inside = row < stop
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        value = read_row(
            x, before, row - (K - 1) + tap, column, start, sample, inside, C, K, HAS_BEFORE
        )
        factor = tl.load(weight + column * K + tap, mask=inside, other=0.0).to(tl.float32)
        total = value * factor if tap == 0 else total + value * factor
    total = tl.where(inside, total, 0.0)
    tl.store(y + at, round_once(total, y.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["size"])
def convolve_grad(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    before: tl.tensor,
    table: tl.tensor,
    dx: tl.tensor,
    terms: tl.tensor,
    size: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute dx[t] = Σ weight[i] · grad[t + K − 1 − i] from the last tap on, and the terms of dweight.

    terms is fp32 [ROWS, C, K]: grad[t] · x[t − K + 1 + i].
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // C, at % C
    start = tl.load(table + row * 3, mask=at < size, other=0)
    stop = tl.load(table + row * 3 + 1, mask=at < size, other=0)
    sample = tl.load(table + row * 3 + 2, mask=at < size, other=0)
    inside = row < stop
    upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        # The output that reads a row through the first tap is the last one that reads it.
        later = inside & (row + tap < stop)
        pulled = tl.load(grad + at + tap * C, mask=later, other=0.0).to(tl.float32)
        factor = tl.load(weight + column * K + (K - 1 - tap), mask=inside, other=0.0).to(tl.float32)
        total = pulled * factor if tap == 0 else total + pulled * factor
        value = read_row(
            x, before, row - (K - 1) + tap, column, start, sample, inside, C, K, HAS_BEFORE
        )
        term = tl.where(inside, upstream * value, 0.0)
        tl.store(terms + at * K + tap, term, mask=at < size)
    total = tl.where(inside, total, 0.0)
    tl.store(dx + at, round_once(total, dx.dtype.element_ty), mask=at < size)


def rows_of_samples(x: Tensor, spans: Tensor | None) -> Tensor:
    """Return the table of a call, on the device of x."""
    samples = whole_samples(x, spans)

    def make() -> Tensor:
        table = torch.zeros(samples.rows, 3, dtype=torch.int64, device="cpu")
        for index, (start, length) in enumerate(samples.spans):
            table[start : start + length] = torch.tensor(
                (start, start + length, index), dtype=torch.int64, device="cpu"
            )
        return table.to(x.device)

    return kept((rows_of_samples, samples.spans, samples.rows), x.device, make)


def launch_elements(
    kernel: object,
    given: tuple[Tensor, ...],
    weight: Tensor,
    spans: Tensor | None,
    before: Tensor | None,
    *out: Tensor,
) -> None:
    """Launch a kernel over the elements of the first of `given`, behind which weight, before, table and out follow."""
    x = given[0]
    tile, factors = tile_of("causal_conv", x.dtype, target_of(x)), weight.contiguous()
    run(
        kernel,
        (-(-x.numel() // tile.size),),
        *(tensor.contiguous() for tensor in given),
        factors,
        factors if before is None else before.contiguous(),
        rows_of_samples(x, spans),
        *out,
        x.numel(),
        warps=tile.warps,
        C=weight.shape[0],
        K=weight.shape[2],
        HAS_BEFORE=before is not None,
        BLOCK=tile.size,
    )


@triton_operator("causal_conv")
def triton_causal_conv(
    x: Tensor, weight: Tensor, spans: Tensor | None, before: Tensor | None, of: int = 0
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_elements(convolve, (x,), weight, spans, before, y)
    return y


@triton_operator("causal_conv_backward")
def triton_causal_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, spans: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return dx, and the terms of dweight."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    terms = torch.empty(*x.shape[:-1], weight.numel(), dtype=torch.float32, device=x.device)
    launch_elements(convolve_grad, (grad, x), weight, spans, before, dx, terms)
    return dx, terms
