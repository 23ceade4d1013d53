"""Kernels whose rows depend on the batch: by integers, by torch before the launch, by other rows, by races."""

import torch
import triton
import triton.language as tl

N = 256


@triton.jit
def sum_rows(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(out + r, tl.sum(tl.load(x + r * n + c, mask=c < n, other=0.0), axis=0))


@triton.jit
def sum_in_splits(x, splits, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    s = tl.load(splits + r)
    per = n // s
    total = 0.0
    for i in range(s):
        part = 0.0
        for j in range(i * per, (i + 1) * per, BLOCK):
            part += tl.sum(tl.load(x + r * n + j + tl.arange(0, BLOCK)), axis=0)
        total += part
    tl.store(out + r, total)


@triton.jit
def sum_updown(x, pos, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    scale = tl.load(pos + r).to(tl.float32) * 0.0 + 1.0
    total = 0.0
    if r % 2 == 0:
        for j in range(0, n, BLOCK):
            total += tl.sum(tl.load(x + r * n + j + tl.arange(0, BLOCK)), axis=0)
    else:
        for j in range(0, n, BLOCK):
            total += tl.sum(tl.load(x + r * n + (n - BLOCK - j) + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + r, total * scale)


# ---- integer tensors with a row axis: rows whose integers differ are never compared
def int_splits_by_batch(rows):
    """num_splits int32 [rows] as FlashMLA/FA3 metadata has it: 4 for small batches, 1 for large ones."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    splits = torch.full((rows,), 4 if rows < 16 else 1, dtype=torch.int32)
    sum_in_splits[(rows,)](x, splits, out, N, 32)
    return out


def int_positions_hide_parity(rows):
    """positions = arange: every row has integers of its own, so order by program id is not seen."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_updown[(rows,)](x, torch.arange(rows), out, N, 64)
    return out


def int_batch_size_tensor(rows):
    """seqlens int32 [rows], all equal to the batch size, used as a hint of the schedule."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    hint = torch.full((rows,), max(1, min(8, 128 // max(rows, 16))), dtype=torch.int32)
    sum_in_splits[(rows,)](x, hint, out, N, 32)
    return out


def int_targets_hide_parity(rows):
    """targets of a cross entropy, random: the same effect as positions."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_updown[(rows,)](x, torch.randint(0, 1000, (rows,)), out, N, 64)
    return out


def int_block_table(rows):
    """block table [rows, 4] of a paged cache, identity: rows have integers of their own; order by row parity."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_updown[(rows,)](
        x, torch.arange(rows * 4, dtype=torch.int32).view(rows, 4)[:, 0].contiguous(), out, N, 64
    )
    return out


# ---- floats that come as integers: values, not symbols
@triton.jit
def sum_bits16(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c, mask=c < n, other=0).to(tl.bfloat16, bitcast=True).to(tl.float32)
    tl.store(out + r, tl.sum(v, axis=0))


@triton.jit
def sum_bits32(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c, mask=c < n, other=0).to(tl.float32, bitcast=True)
    tl.store(out + r, tl.sum(v, axis=0))


def bf16_as_int16(rows):
    x, out = torch.randn(rows, N).bfloat16().view(torch.int16), torch.empty(rows)
    sum_bits16[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 1)
    return out


def fp32_as_int32(rows):
    x, out = torch.randn(rows, N).view(torch.int32), torch.empty(rows)
    sum_bits32[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 1)
    return out


def fp32_as_int32_flat(rows):
    """the storage is flat [rows * N], integers of several rows in one axis"""
    x, out = torch.ones(rows * N).mul_(0.1).view(torch.int32), torch.empty(rows)
    sum_bits32[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 1)
    return out


@triton.jit
def dequant_dot(q, s, w, out, K: tl.constexpr, NN: tl.constexpr, BK: tl.constexpr):
    r = tl.program_id(0)
    total = tl.zeros((NN,), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(q + r * K + k + tl.arange(0, BK)).to(tl.float32) * tl.load(s)
        b = tl.load(w + (k + tl.arange(0, BK))[:, None] * NN + tl.arange(0, NN)[None, :]).to(
            tl.float32
        )
        total += tl.sum(a[:, None] * b, axis=0)
    tl.store(out + r * NN + tl.arange(0, NN), total)


def int8_activations(rows):
    """w8a8: int8 activations are row integers; BLOCK_K by batch."""
    q = torch.randint(-127, 127, (rows, 128), dtype=torch.int8)
    s, w, out = torch.rand(1), torch.randn(128, 16), torch.empty(rows, 16)
    dequant_dot[(rows,)](q, s, w, out, 128, 16, 64 if rows < 16 else 32)
    return out


# ---- what torch computes before the first launch
def torch_prescale_by_rows(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    x = x * 2.0 if rows < 16 else x * 3.0
    sum_rows[(rows,)](x, out, N, N)
    return out


def torch_rounds_by_rows(rows):
    """large batches are computed from rounded inputs (a fast path in bf16)."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    x = x.to(torch.float64).float() if rows < 16 else x.bfloat16().float()
    sum_rows[(rows,)](x, out, N, N)
    return out


def torch_amax_scale(rows):
    """per-tensor dynamic quantization: the scale is the maximum over the batch."""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scale = x.abs().amax().reshape(1)
    scale_rows[(rows,)](x, scale, out, N, N)
    return out


@triton.jit
def scale_rows(x, s, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(out + r * n + c, tl.load(x + r * n + c, mask=c < n) / tl.load(s), mask=c < n)


def torch_matmul_first(rows):
    x, w, out = torch.randn(rows, 64), torch.randn(64, N), torch.empty(rows)
    sum_rows[(rows,)](x @ w, out, N, N)
    return out


def torch_mean_over_batch(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scale_rows[(rows,)](x, x.mean(0).sum().reshape(1), out, N, N)
    return out


def torch_item_choice(rows):
    """the wrapper reads a value of the batch on the host and chooses the order by it."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_rows[(rows,)](x, out, N, N, num_warps=8 if x.abs().max().item() > 4.0 else 4)
    return out


# ---- rows that read other rows
@triton.jit
def last_reads_first(x, out, n, rows, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c, mask=c < n, other=0.0)
    stray = tl.load(x + tl.where(r == rows - 1, 0, r) * n)
    tl.store(out + r, tl.sum(v, axis=0) + stray)


def stray_last_reads_first(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    last_reads_first[(rows,)](x, out, N, rows, N)
    return out


@triton.jit
def middle_reads_neighbour(x, out, n, rows, AT: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c, mask=c < n, other=0.0)
    stray = tl.load(x + tl.where(r == AT, r - 1, r) * n)
    tl.store(out + r, tl.sum(v, axis=0) + stray)


def stray_row_64(rows):
    """a tile's first row reads the last row of the tile before: one stray read per batch."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    middle_reads_neighbour[(rows,)](x, out, N, rows, 64, N)
    return out


def stray_row_1(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    middle_reads_neighbour[(rows,)](x, out, N, rows, 1, N)
    return out


def stray_row_2(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    middle_reads_neighbour[(rows,)](x, out, N, rows, 2, N)
    return out


@triton.jit
def every_reads_next(x, out, n, rows, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c, mask=c < n, other=0.0)
    stray = tl.load(x + (r + 1) % rows * n)
    tl.store(out + r, tl.sum(v, axis=0) + stray)


def stray_every_row(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    every_reads_next[(rows,)](x, out, N, rows, N)
    return out


def stray_by_view(rows):
    """x is a view into a larger storage, and row 0 reads what is before the view."""
    whole, out = torch.randn(rows + 1, N), torch.empty(rows)
    x = whole[1:]
    before[(rows,)](x, out, N, N)
    return out


@triton.jit
def before(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c, mask=c < n, other=0.0)
    tl.store(out + r, tl.sum(v, axis=0) + tl.load(x + r * n - n))


# ---- order by program id, grid, warps, splits: inside what is tried
@triton.jit
def order_by_pid(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    total = 0.0
    if r % 2 == 0:
        for j in range(0, n, BLOCK):
            total += tl.sum(tl.load(x + r * n + j + tl.arange(0, BLOCK)), axis=0)
    else:
        for j in range(0, n, BLOCK):
            total += tl.sum(tl.load(x + r * n + (n - BLOCK - j) + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + r, total)


def pid_parity(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    order_by_pid[(rows,)](x, out, N, 64)
    return out


@triton.jit
def order_by_grid(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    total = 0.0
    first = (tl.num_programs(0) % 4) * BLOCK
    for j in range(0, n, BLOCK):
        total += tl.sum(tl.load(x + r * n + (first + j) % n + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + r, total)


def num_programs_start(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    order_by_grid[(rows,)](x, out, N, 64)
    return out


def warps_by_rows(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_rows[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 4)
    return out


@triton.jit
def constexpr_m(x, out, n, M: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    total = 0.0
    STEP: tl.constexpr = BLOCK if M < 16 else BLOCK // 2
    for j in range(0, n, STEP):
        total += tl.sum(tl.load(x + r * n + j + tl.arange(0, STEP)), axis=0)
    tl.store(out + r, total)


def constexpr_branch(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    constexpr_m[(rows,)](x, out, N, rows, 64)
    return out


@triton.jit
def runtime_m(x, out, n, M, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    total = 0.0
    if M > 64:
        for j in range(0, n, BLOCK):
            total += tl.sum(tl.load(x + r * n + j + tl.arange(0, BLOCK)), axis=0)
    else:
        for j in range(0, n, 2 * BLOCK):
            total += tl.sum(tl.load(x + r * n + j + tl.arange(0, 2 * BLOCK)), axis=0)
    tl.store(out + r, total)


def runtime_branch_on_m(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    runtime_m[(rows,)](x, out, N, rows, 32)
    return out


# ---- atomics, races, uninitialised memory
@triton.jit
def atomic_sum(x, out, n, BLOCK: tl.constexpr):
    r, j = tl.program_id(0), tl.program_id(1)
    c = j * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + r, tl.sum(tl.load(x + r * n + c), axis=0))


def float_atomics(rows):
    x, out = torch.randn(rows, N), torch.zeros(rows)
    atomic_sum[(rows, 4)](x, out, N, 64)
    return out


def float_atomics_large_batches_only(rows):
    x, out = torch.randn(rows, N), torch.zeros(rows)
    if rows < 100:
        sum_rows[(rows,)](x, out, N, N)
    else:
        atomic_sum[(rows, 4)](x, out, N, 64)
    return out


@triton.jit
def plain_accumulate(x, out, n, BLOCK: tl.constexpr):
    r, j = tl.program_id(0), tl.program_id(1)
    c = j * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + r, tl.load(out + r) + tl.sum(tl.load(x + r * n + c), axis=0))


def race_between_ctas(rows):
    x, out = torch.randn(rows, N), torch.zeros(rows)
    plain_accumulate[(rows, 4)](x, out, N, 64)
    return out


@triton.jit
def ticket_order(x, ticket, out, n, BLOCK: tl.constexpr):
    r = tl.atomic_add(ticket, 1)
    total = 0.0
    first = (r % 4) * BLOCK
    for j in range(0, n, BLOCK):
        total += tl.sum(tl.load(x + r * n + (first + j) % n + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + r, total)


def ticket_scheduler(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    ticket_order[(rows,)](x, torch.zeros(1, dtype=torch.int32), out, N, 64)
    return out


@triton.jit
def reads_scratch(x, scratch, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(
        out + r,
        tl.sum(tl.load(x + r * n + c, mask=c < n, other=0.0), axis=0) + tl.load(scratch + r),
    )


def uninitialised(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    reads_scratch[(rows,)](x, torch.empty(rows), out, N, N)
    return out


@triton.jit
def exchange(x, scratch, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(scratch + r * n + c, tl.load(x + r * n + c))
    v = tl.load(scratch + r * n + (BLOCK - 1 - c))
    tl.store(out + r * n + c, v)


def race_in_cta(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    exchange[(rows,)](x, torch.empty(rows, N), out, N, N)
    return out


@triton.jit
def two_writers(x, out, n, BLOCK: tl.constexpr):
    r, j = tl.program_id(0), tl.program_id(1)
    total = 0.0
    for i in range(0, n, BLOCK):
        at = tl.where(j == 0, i, n - BLOCK - i)
        total += tl.sum(tl.load(x + r * n + at + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + r, total)


def last_writer_wins(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    two_writers[(rows, 2)](x, out, N, 64)
    return out


@triton.jit
def spin(x, flag, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    while tl.load(flag, volatile=True) == 0:
        pass
    tl.store(out + r, tl.sum(tl.load(x + r * n + c), axis=0))


def spin_lock(rows):
    """a flag that a later program would set: never ends in the machine?"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    spin[(rows,)](x, torch.zeros(1, dtype=torch.int32), out, N, N)
    return out


@triton.jit
def one_reads_next(x, out, n, AT: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c, mask=c < n, other=0.0)
    stray = tl.load(x + tl.where(r == AT, r + 1, r) * n, mask=True)
    tl.store(out + r, tl.sum(v, axis=0) + stray)


def stray_row_10(rows):
    """row 10 reads row 11, nobody else reads anything"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    one_reads_next[(rows,)](x, out, N, 10, N)
    return out
