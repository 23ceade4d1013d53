"""Kernels whose rows do not depend on the batch, each the twin of a wrong one."""

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tests.certifying.more_wrong_kernels import blocks, sum_words
from tests.certifying.wrong_inputs import WEIGHT, gated, scaled_rows
from tests.certifying.wrong_rows import scale_rows

N = 64


@triton.jit
def add_position(x, positions, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * n + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.load(positions + row).to(tl.float32))


def positions(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    add_position[(rows,)](x, torch.arange(rows), out, N, N)
    return out


@triton.jit
def choose_target(x, targets, out, n):
    row = tl.program_id(0)
    tl.store(out + row, tl.load(x + row * n + tl.load(targets + row)) + tl.load(x + row * n))


def random_targets(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    choose_target[(rows,)](x, torch.randint(0, N, (rows,)), out, N)
    return out


@triton.jit
def store_by_slot(x, slots, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.load(slots + row) * n + at, tl.load(x + row * n + at) * 2.0)


def scattered(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    store_by_slot[(rows,)](x, torch.arange(rows), out, N, N)
    return out


@triton.jit
def read_pages(cache, table, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for page in range(2):
        total += tl.load(cache + tl.load(table + row * 2 + page) * n + at)
    tl.store(out + row * n + at, total)


CACHE = torch.randn(64, N)


def block_table(rows):
    out = torch.empty(rows, N)
    table = (torch.arange(rows * 2, dtype=torch.int32) * 7 % 64).view(rows, 2)
    read_pages[(rows,)](CACHE, table, out, N, N)
    return out


def gate_and_up(rows):
    both, out = torch.randn(rows, 2 * N), torch.empty(rows, N)
    gated[(rows,)](both[:, :N], both[:, N:], out, 2 * N, N, N)
    return out


def weight_from_outside(rows):
    x, out = torch.randn(rows, 256), torch.empty(rows, 256)
    scaled_rows[(rows,)](x, WEIGHT, out, 256, 256)
    return out


@triton.jit
def scale_by_expanded(x, weight, out, n, weight_stride, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    scale = tl.load(weight + row * weight_stride + at)
    tl.store(out + row * n + at, tl.load(x + row * n + at) * scale)


def expanded_weight(rows):
    """One weight for all rows, as a view with a stride of 0."""
    x, weight, out = torch.randn(rows, N), WEIGHT[:N].expand(rows, N), torch.empty(rows, N)
    scale_by_expanded[(rows,)](x, weight, out, N, weight.stride(0), N)
    return out


_kept = {}


def kept_workspace(rows):
    """A weight and a workspace that are made once."""
    if "weight" not in _kept:
        _kept["weight"] = torch.randn(N)
    if rows not in _kept:
        _kept[rows] = torch.empty(rows, N)
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, _kept["weight"], _kept[rows], N, N)
    scaled_rows[(rows,)](_kept[rows], _kept["weight"], out, N, N)
    return out


@triton.jit
def scale_each_row(x, scales, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * n + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * tl.load(scales + row))


def maximum_of_each_row(rows):
    """torch takes the maximum of every row, which has no order."""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scale_each_row[(rows,)](x, x.abs().amax(-1), out, N, N)
    return out


def rounded_in_torch(rows):
    return blocks(torch.randn(rows, 128).bfloat16().float())


def one_scale(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scale_rows[(rows,)](x, torch.rand(1), out, N, N)
    return out


def drawn_words(rows):
    x = torch.randint(0x3F000000, 0x3F800000, (rows, N), dtype=torch.int32)
    out = torch.empty(rows)
    sum_words[(rows,)](x, out, N, N)
    return out


@triton.jit
def pdl_first(x, middle):
    gdc_launch_dependents()
    tl.store(middle + tl.program_id(0), tl.load(x + tl.program_id(0)) + 1.0)


@triton.jit
def pdl_second(middle, out):
    gdc_wait()
    tl.store(out + tl.program_id(0), tl.load(middle + tl.program_id(0)) * 2.0)


def waits(rows):
    x, middle, out = torch.randn(rows), torch.empty(rows), torch.empty(rows)
    pdl_first[(rows,)](x, middle, launch_pdl=True)
    pdl_second[(rows,)](middle, out, launch_pdl=True)
    return out


@triton.jit
def product_and_sum(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    product = tl.load(x + at) * tl.load(y + tl.arange(0, BLOCK))
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(n // 8):
        total = total + product
        product = product * 0.5
    tl.store(out + at, total)


def unfused(rows):
    x, y, out = torch.randn(rows, N), torch.randn(N), torch.empty(rows, N)
    product_and_sum[(rows,)](x, y, out, N, N, enable_fp_fusion=False)
    return out


# ---- one byte per row
@triton.jit
def sign_of_sum(x, out, n: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, n)
    tl.store(out + row, (tl.sum(tl.load(x + row * n + at), axis=0) > 0).to(tl.int8))


def int8_per_row(rows):
    """Two rows share 16 bits, and the last one has none of another row beside it."""
    x, out = torch.randn(rows, N), torch.empty(rows, dtype=torch.int8)
    sign_of_sum[(rows,)](x, out, N)
    return out


def uint8_over_zeros(rows):
    x, out = torch.randn(rows, N), torch.zeros(rows, dtype=torch.uint8)
    sign_of_sum[(rows,)](x, out, N)
    return out


@triton.jit
def double_e5m2(x, out):
    row = tl.program_id(0)
    bits = tl.load(x + row).to(tl.uint16) << 8
    tl.store(out + row, bits.to(tl.float16, bitcast=True).to(tl.float32) * 2)


def e5m2_as_bytes(rows):
    """Floats of one byte: each has a name of its own."""
    x, out = torch.randn(rows).to(torch.float8_e5m2), torch.empty(rows)
    double_e5m2[(rows,)](x.view(torch.uint8), out)
    return out


def int8_scales(rows):
    """An integer of one byte per row, of an odd number of rows."""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scale_each_row[(rows,)](x, torch.full((rows,), 3, dtype=torch.int8), out, N, N)
    return out


# ---- a part of the memory stays as it was
@triton.jit
def rotate(x, n: tl.constexpr, half: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, half)
    a, b = tl.load(x + at), tl.load(x + at + half)
    tl.store(x + at, a * 0.6 - b * 0.8)
    tl.store(x + at + half, a * 0.8 + b * 0.6)


def partial_rotary(rows):
    """In place on the first half of the columns."""
    x = torch.randn(rows, N)
    rotate[(rows,)](x, N, N // 4)
    return x


@triton.jit
def double_odd(x, n: tl.constexpr):
    at = tl.arange(0, n)
    value = tl.load(x + tl.program_id(0) * n + at)
    tl.store(x + tl.program_id(0) * n + at, tl.where(at % 2 == 0, value, value * 2))


def every_second_in_place(rows):
    x = torch.randn(rows, N)
    double_odd[(rows,)](x, N)
    return x


@triton.jit
def double_into(x, out, n: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, n)
    tl.store(out + row * 2 * n + at, tl.load(x + row * n + at) * 2)


def padded_by_zeros(rows):
    x, out = torch.randn(rows, N), torch.zeros(rows, 2 * N)
    double_into[(rows,)](x, out, N)
    return out


# ---- memory that numpy fills
def filled_by_numpy(rows):
    """A buffer of the host is filled and then copied to the GPU."""
    x, host, out = torch.randn(rows, N), torch.empty(N), torch.empty(rows, N)
    host.numpy()[:] = np.linspace(0, 1, N)
    scaled_rows[(rows,)](x, host.to("cuda"), out, N, N)
    return out


def lengths_by_numpy(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    host, device = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    host.numpy()[:] = 3
    device.copy_(host)
    scale_each_row[(rows,)](x, device, out, N, N)
    return out


_staged = {}


def kept_staging(rows):
    """The array of numpy is kept from the first call on."""
    if not _staged:
        _staged["host"] = torch.empty(N)
        _staged["array"] = _staged["host"].numpy()
    _staged["array"][:] = 0.5
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, _staged["host"], out, N, N)
    return out
