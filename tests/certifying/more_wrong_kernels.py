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


# ---- torch combines rows, or chooses by their number, before the launch ------------------------------
def running_maximum(rows):
    return blocks(torch.randn(rows, N).cummax(0).values)


def sorted_by_the_first_column(rows):
    x = torch.randn(rows, N)
    return blocks(x[x[:, 0].argsort()])


def normalised_over_the_batch(rows):
    x = torch.randn(rows, N)
    return blocks(x - x.mean(0))


def softmax_over_rows(rows):
    return blocks(torch.randn(rows, N).softmax(0))


def through_double_for_few_rows(rows):
    x = torch.randn(rows, N)
    return blocks((x.double() / 3.0).float() if rows < 16 else x / 3.0)


def shifted_weights(rows):
    x, weight, out = torch.randn(rows, N), torch.randn(N + 1), torch.empty(rows, N)
    scaled_rows[(rows,)](x, weight[1:] if rows < 16 else weight[:-1], out, N, N)
    return out


def copied_halves(rows):
    """A copy forgets from which half it was made."""
    x, weight, out = torch.randn(rows, N), torch.randn(2 * N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, (weight[:N] if rows < 16 else weight[N:]).clone(), out, N, N)
    return out


def scale_in_a_tensor(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, torch.full((N,), 2.0 if rows < 16 else 3.0), out, N, N)
    return out


@triton.jit
def matrix_product(x, weight, out, N: tl.constexpr):
    row, inner = tl.program_id(0), tl.arange(0, N)
    values = tl.load(x + row * N + inner)[:, None]
    matrix = tl.load(weight + inner[:, None] * N + inner[None, :])
    tl.store(out + row * N + inner, tl.sum(values * matrix, axis=0))


def transposed_weights(rows):
    x, weight, out = torch.randn(rows, 32), torch.randn(32, 32), torch.empty(rows, 32)
    matrix_product[(rows,)](
        x, weight if rows < 16 else weight.t().contiguous(), out, 32, enable_fp_fusion=False
    )
    return out


def transposed_and_doubled_weights(rows):
    x, weight, out = torch.randn(rows, 32), torch.randn(32, 32), torch.empty(rows, 32)
    doubled = weight.mul(2.0) if rows < 16 else torch.mul(weight.t(), 2.0).contiguous()
    matrix_product[(rows,)](x, doubled, out, 32, enable_fp_fusion=False)
    return out


WEIGHT = torch.randn(32, 32)


def transposed_copy_of_a_weight_from_outside(rows):
    x, out = torch.randn(rows, 32), torch.empty(rows, 32)
    weight = WEIGHT.clone() if rows < 16 else WEIGHT.t().contiguous()
    matrix_product[(rows,)](x, weight, out, 32, enable_fp_fusion=False)
    return out


@triton.jit
def gather_and_sum(x, columns, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for at in range(0, n, BLOCK):
        column = tl.load(columns + at + tl.arange(0, BLOCK))
        total += tl.sum(tl.load(x + row * n + column), axis=0)
    tl.store(out + row, total)


def order_of_columns_in_a_table(rows):
    """The table has no rows: what it says differs between batches."""
    columns, out = torch.arange(N), torch.empty(rows)
    gather_and_sum[(rows,)](
        torch.randn(rows, N), columns if rows < 16 else columns.flip(0), out, N, 32
    )
    return out


@triton.jit
def add_to_result(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(out + at) + tl.load(x + at))


def result_starts_with_the_number_of_rows(rows):
    out = torch.full((rows, N), float(rows))
    add_to_result[(rows,)](torch.randn(rows, N), out, N, N)
    return out


# ---- the kernel itself follows the batch --------------------------------------------------------------
@triton.jit
def fold(x, out, n, last, temperature, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """Sum a row in blocks; from the end if HOW says so of this program."""
    row = tl.program_id(0)
    backwards = row == last
    if HOW == "a bit of the program":
        backwards = (row & 4) != 0
    elif HOW == "the number of programs":
        backwards = tl.num_programs(0) > 16
    total = 0.0
    for at in range(0, n, BLOCK):
        place = tl.where(backwards, n - BLOCK - at, at)
        total += tl.sum(tl.load(x + row * n + place + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + row, total * temperature)


def folded(rows, how, last=-1, temperature=1.0):
    out = torch.empty(rows)
    fold[(rows,)](torch.randn(rows, N), out, N, last, temperature, how, 32)
    return out


def last_program_from_the_end(rows):
    return folded(rows, "the last program", rows - 1)


def bit_of_the_program(rows):
    return folded(rows, "a bit of the program")


def number_of_programs(rows):
    return folded(rows, "the number of programs")


def temperature_of_the_batch(rows):
    return folded(rows, "", temperature=1.0 / rows)


@triton.jit
def sum_with_padding(x, out, n, padding, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * n + column, mask=column < n, other=padding)
    tl.store(out + tl.program_id(0), tl.sum(value, axis=0))


def padding_is_the_number_of_rows(rows):
    out = torch.empty(rows)
    sum_with_padding[(rows,)](torch.randn(rows, 100), out, 100, float(rows), N)
    return out


@triton.jit
def subtract_maximum_of_tile(
    x, out, rows, SCALES: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    most = tl.max(tl.max(tl.abs(value), axis=1), axis=0)
    value = value * (448.0 / most) if SCALES else value - most
    tl.store(out + at, value, mask=(row < rows)[:, None])


def of_tiles(rows, scales):
    x, out = torch.randn(rows, 32), torch.empty(rows, 32)
    subtract_maximum_of_tile[(triton.cdiv(rows, 4),)](x, out, rows, scales, 32, 4)
    return out


def maximum_of_a_tile(rows):
    return of_tiles(rows, False)


def scale_of_a_tile(rows):
    return of_tiles(rows, True)


@triton.jit
def product_two_ways(x, weight, out, rows, DOT: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, N)
    at = row[:, None] * N + inner[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    matrix = tl.load(weight + inner[:, None] * N + inner[None, :])
    if DOT:
        found = tl.dot(value, matrix, input_precision="ieee")
    else:
        found = tl.sum(value[:, :, None] * matrix[None, :, :], axis=1)
    tl.store(out + at, found, mask=(row < rows)[:, None])


def matrix_vector_for_few_rows(rows):
    """A kernel of its own for decode, as servers have."""
    x, weight, out = torch.randn(rows, 16), torch.randn(16, 16), torch.empty(rows, 16)
    tile = 1 if rows < 16 else 16
    product_two_ways[(triton.cdiv(rows, tile),)](
        x, weight, out, rows, rows >= 16, 16, tile, enable_fp_fusion=False
    )
    return out


@triton.jit
def add_halves(part, out, HALVES: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for half in range(HALVES):
        total += tl.load(part + row * HALVES + half)
    tl.store(out + row, total)


def halves_for_few_rows(rows):
    """Partial sums by more programs where there are few rows."""
    x, halves = torch.randn(rows, N), 2 if rows < 16 else 1
    part, out = torch.empty(rows * halves), torch.empty(rows)
    sum_blocks[(rows * halves,)](x, part, N // halves, 32)
    add_halves[(rows,)](part, out, halves)
    return out


@triton.jit
def finish(x, out, n, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one function of a row in the way that HOW names."""
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    if HOW == "rounded residual":
        value = (value.to(tl.bfloat16) + value.to(tl.bfloat16)).to(tl.float32)
    elif HOW == "residual":
        value = value + value
    elif HOW == "exp2":
        value = tl.exp2(value * 1.4426950408889634)
    elif HOW == "exp":
        value = tl.exp(value)
    elif HOW == "rsqrt":
        value = value * tl.rsqrt(tl.abs(value) + 1.0)
    elif HOW == "sqrt":
        value = value / tl.sqrt_rn(tl.abs(value) + 1.0)
    elif HOW == "shifted softmax":
        value = tl.exp(value - tl.max(value, axis=0))
        value = value / tl.sum(value, axis=0)
    elif HOW == "softmax":
        value = tl.exp(value)
        value = value / tl.sum(value, axis=0)
    elif HOW == "half sums":
        value = value / tl.sum(value.to(tl.float16), axis=0).to(tl.float32)
    elif HOW == "sums":
        value = value / tl.sum(value, axis=0)
    tl.store(out + at, value)


def finished(rows, few, many):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    finish[(rows,)](x, out, N, few if rows < 16 else many, N, enable_fp_fusion=False)
    return out


def residual_is_rounded_for_many_rows(rows):
    return finished(rows, "residual", "rounded residual")


def exp2_for_many_rows(rows):
    return finished(rows, "exp", "exp2")


def rsqrt_for_few_rows(rows):
    return finished(rows, "rsqrt", "sqrt")


def unshifted_softmax_for_many_rows(rows):
    return finished(rows, "shifted softmax", "softmax")


def half_sums_for_many_rows(rows):
    return finished(rows, "sums", "half sums")


def block_by_parity(rows):
    """Odd batches and even ones have different blocks."""
    return blocks(torch.randn(rows, N), 32 if rows % 2 else 64)


def block_by_remainder(rows):
    return blocks(torch.randn(rows, N), 32 if rows % 7 == 3 else 64)
