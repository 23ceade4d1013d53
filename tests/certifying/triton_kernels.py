"""Triton kernels for tests of the machine, and a compiler that needs no GPU."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(kernel, types, constants, capability, **options):
    """The PTX of a kernel and its bytes of shared memory."""
    names = kernel.arg_names
    signature = {n: types.get(n, "constexpr" if n in constants else "i32") for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if signature[n].startswith("*")
        },
    )
    options.setdefault("enable_fp_fusion", False)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return made.asm["ptx"], made.metadata.shared


@triton.jit
def row_sum(X, Y, N: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(X + row * N + tl.arange(0, N))
    tl.store(Y + row, tl.sum(x, 0))


@triton.jit
def matmul(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pn = tl.cdiv(N, BN)
    rm = tl.program_id(0) // pn * BM + tl.arange(0, BM)
    rn = tl.program_id(0) % pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rm[:, None] * K + rk[None, :] + k, mask=rm[:, None] < M, other=0.0)
        b = tl.load(B + rn[None, :] * K + rk[:, None] + k, mask=rn[None, :] < N, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(C + rm[:, None] * N + rn[None, :], acc, mask=mask)


@triton.jit
def softmax(X, Y, N: tl.constexpr, BLOCK: tl.constexpr):
    """Online: a maximum and a sum over blocks, then the row."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    most = tl.full((), float("-inf"), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(X + row * N + start + at, mask=start + at < N, other=float("-inf"))
        most = tl.maximum(most, tl.max(x, 0))
    for start in range(0, N, BLOCK):
        x = tl.load(X + row * N + start + at, mask=start + at < N, other=float("-inf"))
        tl.store(Y + row * N + start + at, tl.exp2(x - most), mask=start + at < N)
