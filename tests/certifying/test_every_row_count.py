"""Theorem: a certificate says "every row count" only of kernels in which nothing but row masks depends on the rows."""

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

import isobit
from isobit.certifying.judging.configurations import Surveyed, plan
from isobit.certifying.judging.every_row_count import follow_rows
from isobit.certifying.judging.scan import scan_and_add
from isobit.certifying.report.words import conclude
from isobit.certifying.running.compile import Compiler
from tests.certifying import right_kernels

N = 64


def follow(function, target="sm_80"):
    surveyed = Surveyed(function, target, plan(function, None, {})).survey()
    scan_and_add(surveyed, add=True)
    return follow_rows(surveyed, Compiler(target))


def launch(kernel, rows, *more, tile=16, grid=None, weight=False, **named):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    tensors = (x, torch.randn(N), out) if weight else (x, out)
    count = triton.cdiv(rows, tile) if grid is None else grid
    kernel[(count,)](*tensors, rows, *more, N=N, TILE=tile, **named)
    return out


# ---- kernels that earn it -------------------------------------------------------------------------
@triton.jit
def masked_tile(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    total = tl.sum(value, axis=1)
    tl.store(out + at, value + total[:, None], mask=(row < rows)[:, None])


@triton.jit
def norm_with_columns(x, weight, out, rows, columns, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, N)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None] * columns + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=column < columns, other=0.0)
    total = tl.sum(value * value, axis=1)
    tl.store(out + at, value * scale[None, :] / tl.sqrt(total)[:, None], mask=inside)


@triton.jit
def product_of_tile(x, weight, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    inner = tl.arange(0, N)
    matrix = tl.load(weight + inner[:, None] * N + inner[None, :])
    tl.store(out + at, tl.dot(value, matrix), mask=(row < rows)[:, None])


def norm(rows):
    x, out = torch.randn(rows, 48), torch.empty(rows, 48)
    norm_with_columns[(triton.cdiv(rows, 4),)](
        x, torch.randn(48), out, rows, 48, N=N, TILE=4, enable_fp_fusion=False
    )
    return out


def product(rows):
    x, out = torch.randn(rows, N).half(), torch.empty(rows, N)
    product_of_tile[(triton.cdiv(rows, 16),)](x, torch.randn(N, N).half(), out, rows, N=N, TILE=16)
    return out


def tile(rows):
    return launch(masked_tile, rows)


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (tile, (1 << 25) - 1),
        (norm, ((1 << 31) - 1) // 48),
        (product, (1 << 25) - 1),
        (right_kernels.gate_and_up, (1 << 24) - 1),
    ],
)
@pytest.mark.sweep(2)
def test_right_kernels_earn_it_up_to_the_overflow_of_their_indices(function, most):
    found = follow(function)
    assert found.why == ""
    assert most - 16 <= found.most <= most


def test_the_verdict_says_so():
    found = isobit.certify(tile, targets=("sm_80",))
    assert found.kept
    assert f"Every row count up to {found.most_rows:,} that launches these kernels" in conclude(
        found
    )
    assert found.to_dict()["targets"][0]["most_rows"] == found.most_rows > 33_000_000


# ---- kernels that do not --------------------------------------------------------------------------
@triton.jit
def mask_a_thousand_from_the_end(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows - 1000)[:, None], other=1.0)
    tl.store(out + at, value, mask=(row < rows)[:, None])


@triton.jit
def mask_of_the_next_row(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row + 1 < rows)[:, None], other=1.0)
    tl.store(out + at, value, mask=(row < rows)[:, None])


@triton.jit
def mask_from_a_million_rows_on(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    value += tl.load(x + at, mask=(row + 1000000 < rows)[:, None], other=0.0)
    tl.store(out + at, value, mask=(row < rows)[:, None])


@triton.jit
def branch_above(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    if rows * 3 > 15000:
        value = value + value
    tl.store(out + at, value, mask=(row < rows)[:, None])


@triton.jit
def branch_on_the_program(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0)
    row = program * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    if program > 500:
        value = value + value
    tl.store(out + at, value, mask=(row < rows)[:, None])


@triton.jit
def select_by_mask(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    value = tl.where((row < rows - 5000)[:, None], value * 2.0, value)
    tl.store(out + at, value, mask=(row < rows)[:, None])


@triton.jit
def scale_by_rows(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    tl.store(out + at, value + (rows // 5000).to(tl.float32), mask=(row < rows)[:, None])


@triton.jit
def divide_programs(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0)
    tiles = (rows + TILE - 1) // TILE
    row = (program % tiles) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    tl.store(out + at, value, mask=(row < rows)[:, None])


@triton.jit
def persistent(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * N + tl.arange(0, N)
        tl.store(out + at, tl.load(x + at) * 2.0)


@triton.jit
def weight_under_a_row_mask(x, weight, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, N)
    at = row[:, None] * N + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < N)
    value = tl.load(x + at, mask=inside, other=0.0)
    scale = tl.load(weight + column[None, :] + row[:, None] * 0, mask=inside, other=0.0)
    tl.store(out + at, value * scale, mask=inside)


@triton.jit
def position_is_added(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    tl.store(out + at, value + (row // 100000)[:, None].to(tl.float32), mask=(row < rows)[:, None])


@triton.jit
def leaves_early(x, out, rows, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    if row < rows:
        at = row * N + tl.arange(0, N)
        tl.store(out + at, tl.load(x + at) * 2.0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda rows: launch(mask_a_thousand_from_the_end, rows), "no row mask"),
        (lambda rows: launch(mask_of_the_next_row, rows), "a mask is not that of the rows"),
        (lambda rows: launch(mask_from_a_million_rows_on, rows), "a mask leaves out rows"),
        (lambda rows: launch(branch_above, rows), ""),
        (lambda rows: launch(branch_on_the_program, rows), ""),
        (lambda rows: launch(select_by_mask, rows), ""),
        (lambda rows: launch(scale_by_rows, rows), ""),
        (lambda rows: launch(divide_programs, rows), ""),
        (lambda rows: launch(persistent, rows, grid=4), ""),
        (lambda rows: launch(weight_under_a_row_mask, rows, weight=True), ""),
        (lambda rows: launch(position_is_added, rows), ""),
        (lambda rows: launch(leaves_early, rows, grid=rows), "a branch follows the rows"),
        (lambda rows: launch(masked_tile, rows, tile=256), "none of the grid's axes grow"),
        (right_kernels.positions, "has integers"),
        (right_kernels.block_table, "has integers"),
    ],
)
@pytest.mark.sweep(5)
def test_whatever_else_depends_on_the_rows_is_a_reason(function, said):
    found = follow(function)
    assert found.most == 0
    assert said in found.why
    assert found.why


def test_a_certificate_without_it_says_what_it_is_about():
    found = isobit.certify(lambda rows: launch(leaves_early, rows, grid=rows), targets=("sm_80",))
    assert found.kept
    assert not found.most_rows
    assert "For the row counts tried only: a branch follows the rows" in conclude(found)


# ---- integers that overflow, or lose their upper half, above some number of rows ------------------
@triton.jit
def falling_offset(x, out, N: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, N)
    falls = (row * -1000003).to(tl.int64)
    at = row.to(tl.int64) * (1000003 + N) + falls
    tl.store(out + row.to(tl.int64) * N + column, tl.load(x + at + column) * 2)


@triton.jit(do_not_specialize=["rows"])
def cancelling_offset(x, out, rows, N: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, N)
    left = ((rows - row) * 4096).to(tl.int64)
    at = rows.to(tl.int64) * 4096 - left - row.to(tl.int64) * (4096 - N)
    tl.store(out + row.to(tl.int64) * N + column, tl.load(x + at + column) * 2)


@triton.jit
def lower_half(x, out, N: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, N)
    half = tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.u32.u16 $0, a; }",
        "=r,r",
        [row],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    at = half.to(tl.int64) * N
    tl.store(out + row.to(tl.int64) * N + column, tl.load(x + at + column) * 2)


@pytest.mark.parametrize(
    ("kernel", "has_rows", "most"),
    [(falling_offset, False, 2147), (cancelling_offset, True, 1 << 19), (lower_half, False, 0)],
)
def test_no_row_count_is_claimed_above_which_an_integer_overflows(kernel, has_rows, most):
    def function(rows):
        x, out = torch.randn(rows, N), torch.empty(rows, N)
        kernel[(rows,)](x, out, *[rows] * has_rows, N)
        return out

    found = isobit.certify(function, rows=(1, 17), targets=("sm_90",))
    assert found.exit_code == 0, str(found)
    assert found.most_rows <= most
    assert bool(found.most_rows) == bool(most)
