"""Kernels for the tests of the interpreter: decorated as a user does, without or with TRITON_INTERPRET."""

import triton
import triton.language as tl


@triton.jit
def add_product(a, b, acc, K: tl.constexpr, at, rm, rn, rk, P: tl.constexpr):
    x = tl.load(a + rm[:, None] * K + at + rk[None, :])
    y = tl.load(b + rn[None, :] * K + at + rk[:, None])
    return tl.dot(x, y, acc, input_precision=P)


@triton.jit
def two_segments(
    A,
    B,
    C,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SEG: tl.constexpr,
    BK: tl.constexpr,
    P: tl.constexpr,
):
    """Compute A [M, K] @ B [N, K].T: two chains over k, then their sum."""
    rm, rn, rk = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    x = tl.zeros((M, N), tl.float32)
    y = tl.zeros((M, N), tl.float32)
    for k in range(0, SEG, BK):
        x = add_product(A, B, x, K, k, rm, rn, rk, P)
    for k in range(SEG, K, BK):
        y = add_product(A, B, y, K, k, rm, rn, rk, P)
    tl.store(C + rm[:, None] * N + rn[None, :], x + y)


@triton.jit
def fma(A, B, C, O, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(O + i, tl.math.fma(tl.load(A + i), tl.load(B + i), tl.load(C + i)))


@triton.jit
def tree_sum(X, O, N: tl.constexpr, LOG: tl.constexpr):
    x = tl.reshape(tl.load(X + tl.arange(0, N)), (1, N))
    for _ in tl.static_range(LOG):
        x = tl.reshape(x, (1, x.shape[1] // 2, 2))
        left, right = tl.split(x)
        x = left + right
    tl.store(O + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :], x)


@triton.jit
def reduce(X, O, N: tl.constexpr, HOW: tl.constexpr):
    x = tl.load(X + tl.arange(0, N))
    if HOW == "sum":
        r = tl.sum(x)
    elif HOW == "method":
        r = x.sum()
    elif HOW == "scan":
        r = tl.max(tl.cumsum(x, 0))
    elif HOW == "max":
        r = tl.max(x)
    elif HOW == "exp":
        r = tl.max(tl.exp(x))
    elif HOW == "divide":
        r = tl.max(x / 3.0)
    elif HOW == "exact":
        r = tl.max(tl.sqrt_rn(tl.div_rn(x * x, 3.0)))
    elif HOW == "bf16":
        r = tl.max((x.to(tl.bfloat16) + x.to(tl.bfloat16)).to(tl.float32))
    elif HOW == "atomic":
        tl.atomic_add(O + tl.arange(0, N) * 0, x)
        r = 0.0
    elif HOW == "integer":
        r = tl.sum(x.to(tl.int32)).to(tl.float32)
    elif HOW == "fail":
        assert N == 0, "a mistake of the kernel"
    tl.store(O, r)


@triton.jit
def late_accumulator(A, B, C, M: tl.constexpr):
    i = tl.arange(0, M)
    at = i[:, None] * M + i[None, :]
    acc = tl.load(C + at)
    acc += tl.dot(tl.load(A + at), tl.load(B + at), input_precision="ieee")
    tl.store(C + at, acc)


@triton.jit
def other_dots(A, B, C, M: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    i = tl.arange(0, M)
    at = i[:, None] * M + i[None, :]
    if HALF:
        out = tl.dot(tl.load(A + at), tl.load(B + at), out_dtype=tl.float16)
    else:
        out = tl.dot(tl.load(A + at), tl.load(B + at), input_precision=P)
    tl.store(C + at, out)
