"""Kernels whose rows do not depend on the batch, each the twin of a wrong one."""

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
