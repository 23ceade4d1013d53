"""Kernels whose rows depend on the batch, each in a way that the other files do not have."""

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tests.certifying.wrong_inputs import scaled_rows
from tests.certifying.wrong_rows import sum_in_splits, sum_rows

N = 128


@triton.jit
def sum_blocks(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for at in range(0, n, BLOCK):
        total += tl.sum(tl.load(x + row * n + at + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + row, total)


@triton.jit
def sum_parts(x, out, n, splits, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for split in range(splits):
        part = 0.0
        for at in range(split * (n // splits), (split + 1) * (n // splits), BLOCK):
            part += tl.sum(tl.load(x + row * n + at + tl.arange(0, BLOCK)), axis=0)
        total += part
    tl.store(out + row, total)


@triton.jit
def add_epsilon(x, out, n, epsilon, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + epsilon)


def blocks(x, block=64):
    out = torch.empty(x.shape[0])
    sum_blocks[(x.shape[0],)](x, out, N, block)
    return out


def longest_on_the_host(rows):
    lengths = torch.full((rows,), N, dtype=torch.int32)
    return blocks(torch.randn(rows, N), 64 if int(lengths.max()) > 100 else 32)


def scaled_in_place(rows):
    return blocks(torch.randn(rows, N).mul_(2.0 if rows < 16 else 3.0))


def first_half_scaled(rows):
    x = torch.randn(rows, N)
    x[: rows // 2] *= 2.0
    return blocks(x)


def mean_of_rows(rows):
    return blocks(torch.randn(rows, N) / rows)


def numpy_weights(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    weight = np.linspace(0, 1, N, dtype=np.float32) * np.float32(2 if rows < 16 else 3)
    scaled_rows[(rows,)](x, torch.from_numpy(weight), out, N, N)
    return out


def every_second_column(rows):
    whole, out = torch.randn(rows, 2 * N), torch.empty(rows, N)
    weight = torch.randn(2 * N)
    scaled_rows[(rows,)](
        whole[:, :N].contiguous(), weight[::2] if rows < 16 else weight[:N], out, N, N
    )
    return out


def splits_as_a_number(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_parts[(rows,)](x, out, N, 4 if rows > 200 else 2, 32)
    return out


def epsilon_of_large_batches(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    add_epsilon[(rows,)](x, out, N, 1e-5 if rows > 200 else 1e-6, N)
    return out


@triton.jit
def sum_quarters(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    values = tl.load(x + at).to(tl.float8e5, bitcast=True).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(values, axis=0))


def fp8_as_bytes(rows):
    x, out = torch.randint(0, 100, (rows, N), dtype=torch.uint8), torch.empty(rows)
    sum_quarters[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 1)
    return out


def packed_weights(rows):
    """Weights are drawn as integers; their bits are floats."""
    x, out = torch.randint(0x3F000000, 0x3F800000, (rows, N), dtype=torch.int32), torch.empty(rows)
    sum_words[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 1)
    return out


@triton.jit
def sum_words(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + at).to(tl.float32, bitcast=True), axis=0))


@triton.jit
def first_of_three(x, a):
    gdc_launch_dependents()
    tl.store(a + tl.program_id(0), tl.load(x + tl.program_id(0)) + 1.0)


@triton.jit
def second_of_three(x, b):
    gdc_launch_dependents()
    tl.store(b + tl.program_id(0), tl.load(x + tl.program_id(0)) * 2.0)


@triton.jit
def third_of_three(a, b, out):
    gdc_wait()
    tl.store(out + tl.program_id(0), tl.load(a + tl.program_id(0)) + tl.load(b + tl.program_id(0)))


def waits_for_the_second_only(rows):
    """The third launch waits for the second, which has not waited for the first."""
    x, a, b, out = torch.randn(rows), torch.empty(rows), torch.empty(rows), torch.empty(rows)
    first_of_three[(rows,)](x, a, launch_pdl=True)
    second_of_three[(rows,)](x, b, launch_pdl=True)
    third_of_three[(rows,)](a, b, out, launch_pdl=True)
    return out


def flipped_rows(rows):
    return blocks(torch.randn(rows, N).flip(0))


def joined_in_another_order(rows):
    a, b = torch.randn(rows, N // 2), torch.rand(rows, N // 2)
    return blocks(torch.cat([a, b] if rows < 16 else [b, a], 1))


_kept = {}


def weights_kept_by_rows(rows):
    """A weight of its own for small batches, made once and kept."""
    size = "small" if rows < 16 else "large"
    if size not in _kept:
        _kept[size] = torch.randn(N).mul(2.0 if rows < 16 else 3.0)
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, _kept[size], out, N, N)
    return out


def rounded_to_another_type(rows):
    x = torch.randn(rows, N)
    return blocks((x.half() if rows < 16 else x.bfloat16()).float())


@triton.jit
def first_ten_otherwise(x, positions, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    scale = tl.load(positions + row).to(tl.float32) * 0.0 + 1.0
    total = 0.0
    for j in range(0, n, BLOCK):
        at = tl.where(row < 10, j, n - BLOCK - j)
        total += tl.sum(tl.load(x + row * n + at + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + row, total * scale)


def positions_hide_the_first_ten(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    first_ten_otherwise[(rows,)](x, torch.arange(rows), out, N, 32)
    return out


@triton.jit
def add_previous_position(x, positions, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    before = tl.load(positions + tl.maximum(row - 1, 0)).to(tl.float32)
    at = row * n + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + before)


def position_of_the_row_before(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    add_previous_position[(rows,)](x, torch.arange(rows), out, N, N)
    return out


def splits_of_a_setting(rows, splits=1):
    """The setting is in an integer of every row: rows of two settings must not go uncompared."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_in_splits[(rows,)](x, torch.full((rows,), splits, dtype=torch.int32), out, N, 32)
    return out


def warps_above(threshold):
    """Return a function that takes fewer warps above a number of rows."""

    def function(rows):
        x, out = torch.randn(rows, N), torch.empty(rows)
        sum_rows[(rows,)](x, out, N, N, num_warps=2 if rows > threshold else 4)
        return out

    return function


@triton.jit
def sum_by_count(x, out, n, count, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    if count > THRESHOLD:
        for at in range(0, n, BLOCK):
            total += tl.sum(tl.load(x + row * n + at + tl.arange(0, BLOCK)), axis=0)
    else:
        total = tl.sum(tl.load(x + row * n + tl.arange(0, 2 * BLOCK)), axis=0)
    tl.store(out + row, total)


def branch_above(threshold):
    """Return a function whose kernel branches on the number of rows."""

    def function(rows):
        x, out = torch.randn(rows, N), torch.empty(rows)
        sum_by_count[(rows,)](x, out, N, rows, threshold, N // 2, num_warps=1)
        return out

    return function
