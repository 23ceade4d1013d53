"""Kernels whose dots are wgmma on sm_90 and tcgen05 on sm_100, and what the plan says of their results."""

import functools
import re

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isobit.certifying.machine import Buffer, Machine, TensorArgument
from isobit.certifying.names import names
from isobit.certifying.names.leaf import multiply_accumulate, rule_of
from isobit.certifying.ptx import parse

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
def gemm_descriptors(
    A, B, C, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
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


@triton.jit
def gemm_of_host_descriptors(
    a_map, b_map, c_map, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """The same with descriptors that the host passes."""
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BN)
    row, column = pid // columns * BM, pid % columns * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_map.load([row, k]), b_map.load([column, k]).T, acc)
    c_map.store([row, column], acc)


@functools.cache
def compiled(kernel, target, types, constants, stages, warps):
    """Return (PTX, bytes of shared memory) of a kernel; types and constants are tuples of pairs."""
    made = build(kernel, target, types, constants, stages, warps)
    return made.asm["ptx"], made.metadata.shared


@functools.cache
def build(kernel, target, types, constants, stages, warps):
    """Compile a kernel without a GPU."""
    types, constants = dict(types), dict(constants)
    signature = {
        n: types.get(n, "constexpr" if n in constants else "i32") for n in kernel.arg_names
    }
    pointers = [i for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"enable_fp_fusion": False, "num_stages": stages, "num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


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
        (generator.standard_normal((rows, K)) * 2.0 ** generator.integers(-6, 7, (rows, 1))).astype(
            np.float32
        )
        for rows in (M, N)
    )
    if dtype == "fp32":
        return a.view(np.uint32), b.view(np.uint32)
    if dtype == "fp16":
        return a.astype(np.float16).view(np.uint16), b.astype(np.float16).view(np.uint16)
    return tuple(
        np.ascontiguousarray(x.view(np.uint16).reshape(len(x), K, 2)[..., 1]) for x in (a, b)
    )


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


def differences(buffer, bits, named):
    """Return how many results differ from the plan: in bits, and in names."""
    wrong_bits = int((buffer.data.view(np.uint32) != bits.view(np.uint32)).sum())
    return wrong_bits, int((buffer.element_names() != named).sum())


def run_gemm(
    target, dtype, BM, BN, BK, K, M=None, N=None, stages=3, warps=4, trans=(0, 0), edit=None
):
    """Run `gemm` and compare it with the plan; `edit` changes the PTX text first."""
    M, N = M or BM, N or BN
    ptx, shared = gemm_ptx(target, dtype, BM, BN, BK, K, M, N, stages, warps, trans)
    a, b = operands(dtype, M, N, K)
    c = Buffer(np.full((M, N), np.nan, np.float32), label="C")
    arguments = [
        Buffer(stored(a, trans[0]), label="A"),
        Buffer(stored(b, trans[1]), label="B"),
        c,
        M,
        N,
    ]
    machine = Machine(parse(edit(ptx) if edit else ptx), engine=ENGINE)
    machine.run((-(-M // BM) * -(-N // BN),), arguments, shared_bytes=shared)
    return differences(c, *planned(dtype, a, b, trans=trans))


def run_two_dots(target, BM, BK, BN, K, stages, warps, edit=None):
    """Run `two_dots` and compare it with the plan."""
    types = (*((name, "*bf16") for name in "ABD"), ("C", "*fp32"))
    constants = (("K", K), ("BM", BM), ("BK", BK), ("BN", BN))
    ptx, shared = compiled(two_dots, target, types, constants, stages, warps)
    a, b = operands("bf16", BM, K, BN)
    d = operands("bf16", K, K, BN, seed=3)[0]
    c = Buffer(np.full((BM, BN), np.nan, np.float32), label="C")
    buffers = [Buffer(x, label=label) for x, label in ((a, "A"), (b, "B"), (d, "D"))]
    machine = Machine(parse(edit(ptx) if edit else ptx), engine=ENGINE)
    machine.run((1,), [*buffers, c], shared_bytes=shared)
    an, bn, dn = (
        names.input_names(label, x.size, 16).reshape(x.shape)
        for x, label in ((a, "A"), (b, "B"), (d, "D"))
    )
    total, half = np.zeros((BM, BN), np.float32), names.constant_float(0.5)
    named = np.full((BM, BN), names.constant_float(0.0))
    for k in range(0, K, BK):
        block = slice(k, k + BK)
        x = multiply_accumulate(a, b[block], np.zeros((BM, BK), np.float32), ENGINE, "bf16")
        zero = np.full((BM, BK), names.constant_float(0.0))
        xn = names.round_to("bf16", names.dot_tile(an, bn[block], zero, ENGINE, "bf16", 16))
        bits = x.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        turned = np.ascontiguousarray(d[block].T)
        total = multiply_accumulate(rounded, turned, total * np.float32(0.5), ENGINE, "bf16")
        named = names.dot_tile(xn, dn[block].T, names.mul(named, half), ENGINE, "bf16", 16)
    return differences(c, total, named)


def run_descriptors(target, BM, BN, BK, K, M, N, stages=2, warps=4, edit=None):
    """Run `gemm_descriptors` and compare it with the plan."""
    types = (("A", "*bf16"), ("B", "*bf16"), ("C", "*fp32"))
    constants = (("K", K), ("BM", BM), ("BN", BN), ("BK", BK))
    ptx, shared = compiled(gemm_descriptors, target, types, constants, stages, warps)
    a, b = operands("bf16", M, N, K)
    c = Buffer(np.full((M, N), np.nan, np.float32), label="C")
    machine = Machine(parse(edit(ptx) if edit else ptx), engine=ENGINE)
    arguments = [Buffer(a, label="A"), Buffer(b, label="B"), c, M, N]
    machine.run((-(-M // BM) * -(-N // BN),), arguments, shared_bytes=shared)
    return differences(c, *planned("bf16", a, b))


def run_host_descriptors(target, BM, BN, BK, K, M, N, stages=2, warps=4):
    """Run `gemm_of_host_descriptors` and compare it with the plan."""
    boxes = {"a_map": ("bf16", BM, BK), "b_map": ("bf16", BN, BK), "c_map": ("fp32", BM, BN)}
    types = tuple((name, f"tensordesc<{t}[{r},{c}]>") for name, (t, r, c) in boxes.items())
    constants = (("K", K), ("BM", BM), ("BN", BN), ("BK", BK))
    made = build(gemm_of_host_descriptors, target, types, constants, stages, warps)
    a, b = operands("bf16", M, N, K)
    c = Buffer(np.full((M, N), np.nan, np.float32), label="C")
    buffers = [Buffer(a, label="A"), Buffer(b, label="B"), c]
    arguments = []
    for buffer, metadata in zip(buffers, made.metadata.tensordesc_meta, strict=True):
        shape = buffer.data.shape
        arguments += TensorArgument(buffer, shape, (shape[1], 1), metadata).arguments()
    machine = Machine(parse(made.asm["ptx"]), engine=ENGINE)
    grid = (-(-M // BM) * -(-N // BN),)
    machine.run(grid, [*arguments, M, N], shared_bytes=made.metadata.shared)
    return differences(c, *planned("bf16", a, b))


def without(pattern, which=0):
    """Return an edit that removes one line of the PTX text; of a wait, its loop too."""

    def edit(ptx):
        lines = ptx.splitlines()
        found = [i for i, line in enumerate(lines) if re.search(pattern, line)]
        assert found, f"{pattern} is not in the PTX"
        at = found[which]
        if "try_wait" in lines[at]:
            lines[at + 1] = ""
        lines[at] = ""
        return "\n".join(lines)

    return edit


def exchanged(first, second, limit=0):
    """Return an edit that exchanges two texts; `limit` is how often each (0: always)."""

    def edit(ptx):
        assert first in ptx
        assert second in ptx
        count = limit or -1
        return ptx.replace(first, "\0", count).replace(second, first, count).replace("\0", second)

    return edit


def replaced(pattern, by, which=0):
    """Return an edit that replaces one match of a pattern; `by` is text or a function of the match."""

    def edit(ptx):
        found = list(re.finditer(pattern, ptx))
        assert found, f"{pattern} is not in the PTX"
        match = found[which]
        new = by(match) if callable(by) else by
        return ptx[: match.start()] + new + ptx[match.end() :]

    return edit
