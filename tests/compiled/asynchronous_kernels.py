"""Kernels whose dots are wgmma on sm_90 and tcgen05 on sm_100, and what the plan says of their results."""

import functools

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isobit.compiled import names
from isobit.compiled.leaf import multiply_accumulate, rule_of

ENGINE = "tc25x16"
DTYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "tf32"}


@triton.jit
def gemm(
    A, B, C, M, N,
    K: tl.constexpr, SAM: tl.constexpr, SAK: tl.constexpr, SBK: tl.constexpr, SBN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """C [M, N] = A [M, K] @ B [K, N], one chain over K; strides choose the transposes."""
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BN)
    rm = pid // columns * BM + tl.arange(0, BM)
    rn = pid % columns * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a_at = A + rm[:, None] * SAM + rk[None, :] * SAK
    b_at = B + rk[:, None] * SBK + rn[None, :] * SBN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_at + k * SAK, mask=rm[:, None] < M, other=0.0)
        b = tl.load(b_at + k * SBK, mask=rn[None, :] < N, other=0.0)
        acc = tl.dot(a, b, acc)
    out = C + rm[:, None] * N + rn[None, :]
    tl.store(out, acc.to(C.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def two_dots(A, B, D, C, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """C = sum over blocks of round(A @ B_block^T) @ D_block, as attention has it without its softmax."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rk, rn = tl.arange(0, BK), tl.arange(0, BN)
    a = tl.load(A + rm[:, None] * BN + rn[None, :])
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        b = tl.load(B + (k + rk[:, None]) * BN + rn[None, :])
        x = tl.dot(a, b.T)
        d = tl.load(D + (k + rk[:, None]) * BN + rn[None, :])
        acc = tl.dot(x.to(d.dtype), d, acc * 0.5)
    tl.store(C + rm[:, None] * BN + rn[None, :], acc)


@triton.jit
def gemm_descriptors(A, B, C, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The same with tensor descriptors that the kernel makes: bulk copies (TMA)."""
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BN)
    row, column = pid // columns * BM, pid % columns * BN
    a_map = tl.make_tensor_descriptor(A, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    b_map = tl.make_tensor_descriptor(B, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    c_map = tl.make_tensor_descriptor(C, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_map.load([row, k]), b_map.load([column, k]).T, acc)
    c_map.store([row, column], acc)


@functools.cache
def compiled(kernel, target, types, constants, stages, warps):
    """Return (PTX, bytes of shared memory) of a kernel; types and constants are tuples of pairs."""
    types, constants = dict(types), dict(constants)
    signature = {n: types.get(n, "constexpr" if n in constants else "i32") for n in kernel.arg_names}
    pointers = [i for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"enable_fp_fusion": False, "num_stages": stages, "num_warps": warps}
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return made.asm["ptx"], made.metadata.shared


def gemm_ptx(target, dtype, BM, BN, BK, K, M=None, N=None, stages=3, warps=4, trans=(0, 0)):
    """Compile `gemm` for a shape; `trans` says whether A and B are stored the other way round."""
    M, N = M or BM, N or BN
    strides = {
        "SAM": 1 if trans[0] else K, "SAK": M if trans[0] else 1,
        "SBK": N if trans[1] else 1, "SBN": 1 if trans[1] else K,
    }  # fmt: skip
    constants = {"K": K, **strides, "BM": BM, "BN": BN, "BK": BK}
    types = (("A", f"*{dtype}"), ("B", f"*{dtype}"), ("C", "*fp32"))
    return compiled(gemm, target, types, tuple(constants.items()), stages, warps)


def operands(dtype, M, N, K, seed=0):
    """Return raw A [M, K] and B [N, K] as unsigned patterns."""
    generator = np.random.default_rng(seed)
    a, b = (
        (generator.standard_normal((rows, K)) * 2.0 ** generator.integers(-6, 7, (rows, 1))).astype(np.float32)
        for rows in (M, N)
    )
    if dtype == "fp32":
        return a.view(np.uint32), b.view(np.uint32)
    if dtype == "fp16":
        return a.astype(np.float16).view(np.uint16), b.astype(np.float16).view(np.uint16)
    return tuple(np.ascontiguousarray(x.view(np.uint16).reshape(len(x), K, 2)[..., 1]) for x in (a, b))


def stored(matrix, transposed):
    """Return the matrix as it is in memory."""
    return np.ascontiguousarray(matrix.T if transposed else matrix)


def planned(dtype, a, b, label_a="A", label_b="B", trans=(0, 0)):
    """Return the bits and the names that one chain over K gives."""
    kind = DTYPES[dtype]
    bits = 32 if dtype == "fp32" else 16
    total = multiply_accumulate(a, b, np.zeros((len(a), len(b)), np.float32), ENGINE, kind)
    named = [
        (names.input_names(label, x.size, bits).reshape(x.shape[::-1]).T if t
         else names.input_names(label, x.size, bits).reshape(x.shape))
        for x, label, t in ((a, label_a, trans[0]), (b, label_b, trans[1]))
    ]  # fmt: skip
    zero = np.full(total.shape, names.constant_float(0.0))
    return total, names.dot_tile(*named, zero, ENGINE, kind, rule_of(ENGINE, kind).products)
