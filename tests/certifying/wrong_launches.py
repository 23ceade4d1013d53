"""Kernels whose rows depend on the batch: by what is launched, by instructions, by state."""

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents

N = 256


# ---- products
@triton.jit
def gemm(
    a,
    b,
    c,
    M,
    K: tl.constexpr,
    NN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PREC: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, NN)
    acc = tl.zeros((BM, NN), tl.float32)
    for k in range(0, K, BK):
        kk = k + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + kk[None, :], mask=m[:, None] < M, other=0.0)
        y = tl.load(b + kk[:, None] * NN + n[None, :])
        acc = tl.dot(x, y, acc, input_precision=PREC)
    tl.store(c + m[:, None] * NN + n[None, :], acc, mask=m[:, None] < M)


@triton.jit
def gemm_split(
    a,
    b,
    c,
    M,
    K: tl.constexpr,
    NN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    S: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, NN)
    total = tl.zeros((BM, NN), tl.float32)
    for s in tl.static_range(S):
        acc = tl.zeros((BM, NN), tl.float32)
        for k in range(s * (K // S), (s + 1) * (K // S), BK):
            kk = k + tl.arange(0, BK)
            x = tl.load(a + m[:, None] * K + kk[None, :], mask=m[:, None] < M, other=0.0)
            y = tl.load(b + kk[:, None] * NN + n[None, :])
            acc = tl.dot(x, y, acc, max_num_imprecise_acc=1)
        total = total + acc
    tl.store(c + m[:, None] * NN + n[None, :], total, mask=m[:, None] < M)


def mats(rows, K=128, NN=32, dtype=torch.bfloat16):
    return torch.randn(rows, K).to(dtype), torch.randn(K, NN).to(dtype), torch.empty(rows, NN)


def split_k_above_256(rows):
    """the threshold is above what is tried by default"""
    a, b, c = mats(rows)
    gemm_split[(triton.cdiv(rows, 16),)](a, b, c, rows, 128, 32, 16, 32, 4 if rows > 256 else 1)
    return c


def split_k_at_200(rows):
    """between 130 and the pilot's 261"""
    a, b, c = mats(rows)
    gemm_split[(triton.cdiv(rows, 16),)](a, b, c, rows, 128, 32, 16, 32, 4 if rows > 200 else 1)
    return c


def split_k_for_16_to_64(rows):
    """a window between the default counts 3 and 70"""
    a, b, c = mats(rows)
    gemm_split[(triton.cdiv(rows, 16),)](
        a, b, c, rows, 128, 32, 16, 32, 4 if 16 <= rows <= 64 else 1
    )
    return c


def split_k_when_tiles_are_full(rows):
    """a fast path without masks for multiples of 16"""
    a, b, c = mats(rows)
    gemm_split[(triton.cdiv(rows, 16),)](a, b, c, rows, 128, 32, 16, 32, 2 if rows % 16 == 0 else 1)
    return c


def split_k_by_rows(rows):
    a, b, c = mats(rows)
    gemm_split[(triton.cdiv(rows, 16),)](a, b, c, rows, 128, 32, 16, 32, 4 if rows < 64 else 1)
    return c


def tf32_or_ieee(rows):
    a, b, c = mats(rows, dtype=torch.float32)
    gemm[(triton.cdiv(rows, 16),)](a, b, c, rows, 128, 32, 16, 32, "tf32" if rows > 64 else "ieee")
    return c


def tf32_or_tf32x3(rows):
    a, b, c = mats(rows, dtype=torch.float32)
    gemm[(triton.cdiv(rows, 16),)](
        a, b, c, rows, 128, 32, 16, 32, "tf32" if rows > 64 else "tf32x3"
    )
    return c


# ---- autotuning
@triton.autotune(
    configs=[triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 128) for w in (1, 4)], key=["M"]
)
@triton.jit
def tuned_sum(x, out, M, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    total = 0.0
    for j in range(0, n, BLOCK):
        total += tl.sum(tl.load(x + r * n + j + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + r, total)


def autotune_by_m(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    tuned_sum[(rows,)](x, out, rows, N)
    return out


def make(body):
    return body


@triton.jit
def halves_a(x, part, n, S: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, 128)
    if S == 1:
        tl.store(
            part + r * 2,
            tl.sum(tl.load(x + r * n + c), axis=0) + tl.sum(tl.load(x + r * n + 128 + c), axis=0),
        )
        tl.store(part + r * 2 + 1, 0.0)
    else:
        tl.store(part + r * 2, tl.sum(tl.load(x + r * n + c), axis=0))
        tl.store(part + r * 2 + 1, tl.sum(tl.load(x + r * n + 128 + c), axis=0))


@triton.jit
def halves_b(part, out, S: tl.constexpr):
    r = tl.program_id(0)
    if S == 1:
        tl.store(out + r, tl.load(part + r * 2))
    else:
        tl.store(out + r, tl.load(part + r * 2) + tl.load(part + r * 2 + 1))


tuned_a = triton.autotune(configs=[triton.Config({"S": 1}), triton.Config({"S": 2})], key=[])(
    halves_a
)
tuned_b = triton.autotune(configs=[triton.Config({"S": 2}), triton.Config({"S": 1})], key=[])(
    halves_b
)


def autotuned_pair(rows):
    """two autotuned kernels whose configurations must fit together: (S=2, S=1) loses half of the row"""
    x, part, out = torch.randn(rows, N), torch.empty(rows, 2), torch.empty(rows)
    tuned_a[(rows,)](x, part, N)
    tuned_b[(rows,)](part, out)
    return out


def kernel_factory(order):
    if order == 0:

        @triton.autotune(
            configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 32})], key=[]
        )
        @triton.jit
        def kernel(x, out, n, BLOCK: tl.constexpr):
            r = tl.program_id(0)
            total = 0.0
            for j in range(0, n, BLOCK):
                total += tl.sum(tl.load(x + r * n + j + tl.arange(0, BLOCK)), axis=0)
            tl.store(out + r, total)

        return kernel

    @triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=[])
    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        r = tl.program_id(0)
        tl.arange(0, BLOCK)
        tl.store(out + r, tl.load(x + r) * 2.0)

    return kernel


first_kernel, second_kernel = kernel_factory(0), kernel_factory(1)


def two_kernels_of_one_name(rows):
    """both are called `kernel`: the second hides the configurations of the first"""
    x, mid, out = torch.randn(rows, N), torch.empty(rows), torch.empty(rows)
    first_kernel[(rows,)](x, mid, N)
    second_kernel[(rows,)](mid, out, N)
    return out


@triton.heuristics({"BLOCK": lambda args: 64 if args["M"] < 64 else 128})
@triton.jit
def heuristic_sum(x, out, M, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    total = 0.0
    for j in range(0, n, BLOCK):
        total += tl.sum(tl.load(x + r * n + j + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + r, total)


def heuristics_on_m(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    heuristic_sum[(rows,)](x, out, rows, N)
    return out


# ---- specialisation: multiples of 16, alignment
@triton.jit
def channel_sums(x, out, M, C: tl.constexpr, BM: tl.constexpr):
    """x is [C, M], features first (NCHW): the row is a column"""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    v = tl.load(x + c[:, None] * M + m[None, :], mask=m[None, :] < M, other=0.0)
    tl.store(out + m, tl.sum(v, axis=0), mask=m < M)


def channels_first(rows):
    """M % 16 decides the layout of the tile: 1, 3, 70 and 130 are all of one kind"""
    x, out = torch.randn(128, rows), torch.empty(rows)
    channel_sums[(triton.cdiv(rows, 32),)](x, out, rows, 128, 32)
    return out


@triton.jit
def sum_rows(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(out + r, tl.sum(tl.load(x + r * n + c, mask=c < n, other=0.0), axis=0))


def alignment_by_rows(rows):
    """a view that begins one element later in large batches (packed buffers)"""
    whole, out = torch.randn(rows * N + 4), torch.empty(rows)
    x = whole[(1 if rows > 64 else 0) :][: rows * N].view(rows, N)
    sum_rows[(rows,)](x, out, N, N)
    return out


def alignment(rows, offset=0):
    whole, out = torch.randn(rows * N + 4), torch.empty(rows)
    x = whole[offset:][: rows * N].view(rows, N)
    sum_rows[(rows,)](x, out, N, N)
    return out


# ---- block pointers, descriptors, warp specialisation
@triton.jit
def block_pointer_sum(x, out, M, n, BLOCK: tl.constexpr):
    p = tl.make_block_ptr(x, (M, n), (n, 1), (tl.program_id(0), 0), (1, BLOCK), (1, 0))
    total = tl.zeros((1,), tl.float32)
    for _j in range(0, n, BLOCK):
        total += tl.sum(tl.load(p, boundary_check=(0, 1), padding_option="zero"), axis=1)
        p = tl.advance(p, (0, BLOCK))
    tl.store(out + tl.program_id(0) + tl.arange(0, 1), total)


def block_pointers(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    block_pointer_sum[(rows,)](x, out, rows, N, 64 if rows < 16 else 128)
    return out


@triton.jit
def descriptor_sum(x, out, M, n, BLOCK: tl.constexpr):
    d = tl.make_tensor_descriptor(x, [M, n], [n, 1], [8, BLOCK])
    total = tl.zeros((8,), tl.float32)
    r = tl.program_id(0) * 8
    for j in range(0, n, BLOCK):
        total += tl.sum(d.load([r, j]), axis=1)
    rows = r + tl.arange(0, 8)
    tl.store(out + rows, total, mask=rows < M)


def descriptors(rows):
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    x, out = torch.randn(rows, N), torch.empty(rows)
    descriptor_sum[(triton.cdiv(rows, 8),)](x, out, rows, N, 64 if rows < 16 else 128)
    return out


@triton.jit
def specialised(a, b, c, M, K: tl.constexpr, NN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, NN)
    acc = tl.zeros((BM, NN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=True):
        kk = k + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + kk[None, :], mask=m[:, None] < M, other=0.0)
        y = tl.load(b + kk[:, None] * NN + n[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * NN + n[None, :], acc, mask=m[:, None] < M)


def warp_specialised(rows):
    a, b, c = mats(rows, NN=64)
    specialised[(triton.cdiv(rows, 64),)](a, b, c, rows, 128, 64, 64, 64 if rows < 16 else 32)
    return c


# ---- assembly, libdevice, approximations
@triton.jit
def asm_smid(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c)
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    total = tl.sum(v, axis=0)
    tl.store(out + r, tl.where(sm % 2 == 0, total, total + 1e-7))


def asm_reads_smid(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    asm_smid[(rows,)](x, out, N, N)
    return out


@triton.jit
def asm_clock(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c)
    t = tl.inline_asm_elementwise(
        "mov.u32 $0, %clock;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out + r, tl.sum(v, axis=0) + (t % 2).to(tl.float32))


def asm_reads_clock(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    asm_clock[(rows,)](x, out, N, N)
    return out


@triton.jit
def asm_rz(x, out, n, M, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c)
    w = tl.inline_asm_elementwise(
        "add.rz.f32 $0, $1, $2;", "=f,f,f", [v, v * 1e-4], dtype=tl.float32, is_pure=True, pack=1
    )
    u = tl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [v, v * 1e-4], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + r * n + c, tl.where(M > 64, w, u))


def asm_rounding_by_m(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    asm_rz[(rows,)](x, out, N, rows, N)
    return out


@triton.jit
def exp_two_ways(x, out, n, M, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c)
    tl.store(out + r * n + c, tl.where(M > 64, tl.exp(v), libdevice.exp(v)))


def exp_by_m(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    exp_two_ways[(rows,)](x, out, N, rows, N)
    return out


@triton.jit
def div_two_ways(x, out, n, M, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c)
    if M > 64:
        tl.store(out + r * n + c, tl.div_rn(v, 3.0))
    else:
        tl.store(out + r * n + c, v / 3.0)


def div_by_m(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    div_two_ways[(rows,)](x, out, N, rows, N)
    return out


# ---- loops that depend on data, scans, sorting, random numbers, fp64
@triton.jit
def newton(x, out, n):
    r = tl.program_id(0)
    v = tl.load(x + r * n)
    y = v
    while tl.abs(y * y - v) > 1e-6:
        y = 0.5 * (y + v / y)
    tl.store(out + r, y)


def loop_on_data(rows):
    """TRUTH: invariant, but a branch on data"""
    x, out = torch.rand(rows, N) + 1, torch.empty(rows)
    newton[(rows,)](x, out, N)
    return out


@triton.jit
def loop_on_neighbours_length(x, lengths, out, n, rows, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    longest = tl.max(
        tl.load(lengths + tl.arange(0, 256), mask=tl.arange(0, 256) < rows, other=0), axis=0
    )
    total = 0.0
    first = (longest % 4) * BLOCK
    for j in range(0, n, BLOCK):
        total += tl.sum(tl.load(x + r * n + (first + j) % n + tl.arange(0, BLOCK)), axis=0)
    tl.store(out + r, total)


def longest_of_the_batch(rows):
    """the order depends on the longest sample of the batch; lengths as a user would make them: all the same"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    loop_on_neighbours_length[(rows,)](
        x, torch.full((rows,), N, dtype=torch.int32), out, N, rows, 32
    )
    return out


@triton.jit
def scan(x, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(out + r * n + c, tl.cumsum(tl.load(x + r * n + c), axis=0))


def cumsum_by_warps(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scan[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 1)
    return out


@triton.jit
def dropout(x, out, n, seed, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    keep = tl.rand(seed, r * n + c) > 0.5
    tl.store(out + r * n + c, tl.where(keep, tl.load(x + r * n + c) * 2, 0.0))


def dropout_by_place(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    dropout[(rows,)](x, out, N, 7, N)
    return out


def dropout_seed_is_batch(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    dropout[(rows,)](x, out, N, rows, N)
    return out


def double_by_warps(rows):
    x, out = torch.randn(rows, N, dtype=torch.float64), torch.empty(rows, dtype=torch.float64)
    sum_rows[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 1)
    return out


def half_by_warps(rows):
    x, out = torch.randn(rows, N, dtype=torch.float16), torch.empty(rows, dtype=torch.float16)
    sum_rows[(rows,)](x, out, N, N, num_warps=8 if rows < 16 else 1)
    return out


# ---- persistent kernels
@triton.jit
def persistent(x, out, rows, n, P: tl.constexpr, BLOCK: tl.constexpr):
    total = 0.0
    for r in range(tl.program_id(0), rows, P):
        for j in range(0, n, BLOCK):
            total += tl.sum(tl.load(x + r * n + j + tl.arange(0, BLOCK)), axis=0)
        tl.store(out + r, total)
        total = total * 0.0


def persistent_carries_over(rows, sms=132):
    """the sum of the row before is multiplied by 0 and carried on; only if a program has two rows (> 132)"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    persistent[(min(rows, sms),)](x, out, rows, N, sms, 64)
    return out


@triton.jit
def max_of_batch(x, out, n, rows, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c)
    other = tl.load(x + ((r + rows // 2) % rows) * n + c)
    tl.store(out + r * n + c, v + 0.0 * other)


def other_row_times_zero(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    max_of_batch[(rows,)](x, out, N, rows, N)
    return out


@triton.jit
def nan_variant(x, out, n, M, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + c)
    if M > 64:
        tl.store(out + r * n + c, tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        tl.store(out + r * n + c, tl.maximum(v, 0.0))


def relu_nan_by_m(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    nan_variant[(rows,)](x, out, N, rows, N)
    return out


@triton.jit
def bias_grad(g, out, rows, n, BLOCK: tl.constexpr, R: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in range(0, rows, R):
        rr = r + tl.arange(0, R)
        total += tl.sum(
            tl.load(g + rr[:, None] * n + c[None, :], mask=rr[:, None] < rows, other=0.0), axis=0
        )
    tl.store(out + c, total)


def weight_gradient_only(rows):
    """a gradient over rows has no row axis"""
    g, out = torch.randn(rows, N), torch.empty(N)
    bias_grad[(N // 64,)](g, out, rows, N, 64, 16)
    return out


class AtomicBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty(x.shape[0])
        sum_rows[(x.shape[0],)](x, out, N, N)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        dx = torch.zeros_like(x)
        spread[(x.shape[0],)](g, dx, N, N)
        return dx


@triton.jit
def spread(g, dx, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.atomic_add(dx + r * n + c, tl.load(g + r) + 0.0 * c)


def atomics_in_backward(rows):
    """the forward is invariant; the backward adds by atomics. Only the forward is seen."""
    x = torch.randn(rows, N, requires_grad=True)
    return AtomicBackward.apply(x)


def atomics_in_backward_called(rows):
    x = torch.randn(rows, N)
    with torch.enable_grad():
        x.requires_grad_()
        y = AtomicBackward.apply(x)
        y.backward(torch.randn(rows))
    return x.grad


def by_grad_mode(rows):
    """the training path (grad enabled) chooses warps by rows"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_rows[(rows,)](
        x, out, N, N, num_warps=(8 if rows < 16 else 4) if torch.is_grad_enabled() else 4
    )
    return out


_cache = {}


def cached_plan(rows):
    """a plan cached by what was called first: certify calls with the same sizes again and again"""
    warps = _cache.setdefault("warps", 8 if rows < 16 else 4)
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_rows[(rows,)](x, out, N, N, num_warps=warps)
    return out


def env_choice(rows):
    """the wrapper looks at the device's properties, which are absent here"""
    try:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
    except Exception:
        sms = 0
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_rows[(rows,)](x, out, N, N, num_warps=(8 if rows < sms else 4) if sms else 4)
    return out


@triton.jit
def loop_forever(x, out, n, rows, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    i = 0
    while i < 1000000000:
        i += 1 + (rows >> 30)
    tl.store(out + r, tl.sum(tl.load(x + r * n + c), axis=0) + i * 0.0)


# ---- programmatic dependent launch: the second kernel may run before the first has ended


@triton.jit
def pdl_first(x, mid, n, BLOCK: tl.constexpr):
    gdc_launch_dependents()
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(mid + r, tl.sum(tl.load(x + r * n + c), axis=0))


@triton.jit
def pdl_second(mid, out):
    r = tl.program_id(0)
    tl.store(out + r, tl.load(mid + r) * 2.0)


def pdl_without_wait(rows):
    """launch_pdl=True and no gdc_wait: a race between two launches (Hopper and later)"""
    x, mid, out = torch.randn(rows, N), torch.empty(rows), torch.empty(rows)
    pdl_first[(rows,)](x, mid, N, N, launch_pdl=True)
    pdl_second[(rows,)](mid, out, launch_pdl=True)
    return out


def cluster_of_two(rows):
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_rows[(rows,)](x, out, N, N, num_ctas=2 if rows > 16 else 1)
    return out


@triton.jit
def fp16_acc(a, b, c, M, K: tl.constexpr, NN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, NN)
    acc = tl.zeros((BM, NN), tl.float16)
    for k in range(0, K, BK):
        kk = k + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + kk[None, :], mask=m[:, None] < M, other=0.0)
        y = tl.load(b + kk[:, None] * NN + n[None, :])
        acc += tl.dot(x, y, out_dtype=tl.float16)
    tl.store(c + m[:, None] * NN + n[None, :], acc, mask=m[:, None] < M)


def fp16_accumulator(rows):
    a, b, _ = mats(rows, dtype=torch.float16)
    c = torch.empty(rows, 32, dtype=torch.float16)
    fp16_acc[(triton.cdiv(rows, 16),)](a, b, c, rows, 128, 32, 16, 32 if rows < 16 else 64)
    return c


@triton.jit
def heads_outer(x, out, rows, n, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(out + p, tl.sum(tl.load(x + p * n + c), axis=0))


def heads_before_rows(rows):
    """TRUTH: invariant. x is [heads * rows, N] with the head outermost"""
    x, out = torch.randn(4 * rows, 64), torch.empty(4 * rows)
    heads_outer[(4 * rows,)](x, out, rows, 64, 64)
    return out


@triton.jit
def mix_in_int(x, ids, out, n, rows, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    other = tl.load(ids + (r + 1) % rows)
    tl.store(out + r, tl.sum(tl.load(x + r * n + c), axis=0) + other.to(tl.float32))


def int_of_other_row(rows):
    """adds an integer of another row: integers carry no label"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    mix_in_int[(rows,)](x, torch.full((rows,), 3, dtype=torch.int32), out, N, rows, N)
    return out


@triton.jit
def prefetched_dot(x, y, out, n, BLOCK: tl.constexpr):
    """a dot product per column with the next product computed ahead (prefetch)"""
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    p = tl.load(x + r * n * BLOCK + c) * tl.load(y + c)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(1, n):
        acc = acc + p
        p = tl.load(x + (r * n + i) * BLOCK + c) * tl.load(y + i * BLOCK + c)
    tl.store(out + r * BLOCK + c, acc + p)


def open_products_by_warps(rows):
    """PTX: one expression. SASS: FMUL+FADD with 1 warp, FFMA with 4 warps (ptxas unrolls and fuses)."""
    x, y, out = torch.randn(rows, 9, 256), torch.randn(9, 256), torch.empty(rows, 256)
    prefetched_dot[(rows,)](x, y, out, 9, 256, num_warps=1 if rows < 16 else 4)
    return out


@triton.jit
def prefetched_and_fused(x, y, xb, yb, out, n, BLOCK: tl.constexpr, MORE: tl.constexpr):
    """the same, and products of widened bf16 that are fused in the PTX"""
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    p = tl.load(x + r * n * BLOCK + c) * tl.load(y + c)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(1, n):
        acc = acc + p
        p = tl.load(x + (r * n + i) * BLOCK + c) * tl.load(y + i * BLOCK + c)
    acc = acc + p
    for j in tl.static_range(MORE):
        a = tl.load(xb + (r * MORE + j) * BLOCK + c).to(tl.float32)
        acc = tl.math.fma(a, tl.load(yb + j * BLOCK + c).to(tl.float32), acc)
    tl.store(out + r * BLOCK + c, acc)


def open_products_next_to_fused(rows, num_warps=4):
    """On sm_100 the fma of the PTX are FHFMA, and with 4 warps as many FFMA are what ptxas fused."""
    x, y, out = torch.randn(rows, 9, 256), torch.randn(9, 256), torch.empty(rows, 256)
    xb, yb = torch.randn(rows, 4, 256).bfloat16(), torch.randn(4, 256).bfloat16()
    prefetched_and_fused[(rows,)](x, y, xb, yb, out, 9, 256, 4, num_warps=num_warps)
    return out


def channels_first_4(rows):
    """Features first, four entries per row: the stride is a multiple of 16 for none of 1, 3, 70 and 130 rows."""
    x, out = torch.randn(64, rows * 4), torch.empty(rows * 4)
    channel_sums[(triton.cdiv(rows * 4, 32),)](x, out, rows * 4, 64, 32)
    return out


# ---- values that Python reads without an operator of torch
@triton.jit
def sums(x, out, n: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, n)
    tl.store(out + row, tl.sum(tl.load(x + row * n + at), axis=0))


def sums_by(rows, choose):
    """the number of warps follows what the batch holds"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    lengths = torch.full((rows,), N, dtype=torch.int32)
    sums[(rows,)](x, out, N, num_warps=8 if choose(x, lengths) else 4)
    return out


def warps_by_list_of_lengths(rows):
    return sums_by(rows, lambda x, lengths: max(lengths.tolist()) > 1000)


def warps_by_list(rows):
    return sums_by(rows, lambda x, lengths: max(x[0].tolist()) > 100)


def warps_by_numpy(rows):
    return sums_by(rows, lambda x, lengths: x.cpu().numpy().max() > 100)


def warps_by_array(rows):
    return sums_by(rows, lambda x, lengths: np.asarray(lengths).max() > 1000)


def warps_by_iteration(rows):
    return sums_by(rows, lambda x, lengths: any(each > 1000 for each in lengths))


def warps_by_allclose(rows):
    return sums_by(rows, lambda x, lengths: torch.allclose(x, x + 1))


def warps_by_split(rows):
    return sums_by(rows, lambda x, lengths: len(torch.tensor_split(x, lengths.long())[0]) > N)


def warps_by_array_that_torch_fills(rows):
    """the array is made before there is anything in it"""

    def choose(x, lengths):
        host = torch.empty_like(lengths)
        array = host.numpy()
        host.copy_(lengths)
        return array.max() > 1000

    return sums_by(rows, choose)


def grid_by_lengths(rows):
    """the grid is a function, which reads a value"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    lengths = torch.full((rows,), N, dtype=torch.int32)
    sums[lambda given: (rows + (lengths.max().item() > 1000),)](x, out, N)
    return out


# ---- reset_to_zero: Triton clears memory while it tunes, and not in the calls after it
@triton.jit
def add_into(x, out, n: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, n)
    tl.store(out + at, tl.load(out + at) + tl.load(x + at))


def tuned_add(rows, *configurations):
    """adds to memory that nobody initialised"""
    tuned = triton.autotune(list(configurations), key=["n"], reset_to_zero=["out"])(add_into)
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    tuned[(rows,)](x, out, N)
    return out


def reset_of_one(rows):
    return tuned_add(rows, triton.Config({}))


def reset_of_two(rows):
    return tuned_add(rows, triton.Config({}), triton.Config({}, num_stages=2))
