"""An interpreted kernel gives the bits of the plan over an engine; what the interpreter cannot do as a GPU does raises.

The control is Triton's own interpreter: on the same kernels its bits differ.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps
from triton.runtime.jit import JITFunction

import isobit
from isobit.certifying import interpret, interpreted
from isobit.certifying.names.leaf import fused_multiply_add
from isobit.errors import ArgumentError, UnsupportedError
from isobit.order.engines import tensor_core
from isobit.order.evaluate import add_fp32, fma_fp32
from isobit.order.plan import FeaturePlan
from tests.certifying import interpreted_kernels as kernels

M, N, K, SEG = 16, 16, 512, 256
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}


def run(dtype, engine=None, precision="tf32", block=64):
    own = torch.Generator().manual_seed(1)  # threads share torch's
    a, b = (torch.randn(n, K, generator=own).to(dtype) for n in (M, N))
    c = torch.empty(M, N)
    kernel = kernels.two_segments
    kernel = interpret(kernel, engine) if engine else kernel
    kernel[(1,)](a, b, c, M=M, N=N, K=K, SEG=SEG, BK=block, P=precision)
    return a, b, c


def bits(x):
    return x.detach().numpy().view(np.uint32)


def test_fp32_gives_the_bits_of_isobit_linear():
    width = next(k for k in (64, 128, 256, 512, 1024, 2048) if len(FeaturePlan(k).segments) == 2)
    a, b, c = torch.randn(M, width), torch.randn(N, width), torch.empty(M, N)
    first = sum(leaf.length for leaf in FeaturePlan(width).segments[0])
    for block in (16, 32):
        sizes = {"M": M, "N": N, "K": width, "SEG": first, "BK": block}
        interpret(kernels.two_segments)[(1,)](a, b, c, **sizes, P="ieee")
        assert np.array_equal(bits(c), bits(isobit.linear(a, b)))


def plan(a, b, engine):
    """Two segments of a chain of steps, then their sum, by the scalar definition."""
    c = torch.empty(M, N)
    left, right = a.double().tolist(), b.double().tolist()
    for i in range(M):
        for j in range(N):
            factors = list(zip(left[i], right[j], strict=True))
            c[i, j] = add_fp32(engine(None, factors[:SEG]), engine(None, factors[SEG:]))
    return c


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("engine", ["tc24x8", "tc25x16", "cdna3"])
def test_gives_the_plan_over_the_engine(engine, dtype):
    a, b, c = run(TYPES[dtype], engine)
    if dtype == "tf32":
        a, b = (
            torch.from_numpy(x.numpy().view(np.uint32) >> 13 << 13).view(torch.float32)
            for x in (a, b)
        )
    assert np.array_equal(bits(c), bits(plan(a, b, tensor_core(engine, dtype))))


def test_engines_give_different_bits():
    found = {
        bits(run(torch.bfloat16, engine)[2]).tobytes() for engine in ("tc24x8", "tc25x16", "cdna3")
    }
    assert len(found) == 3


def test_fma_is_fused():
    a, b, c = (torch.randn(256) for _ in range(3))
    out = torch.empty(256)
    interpret(kernels.fma)[(1,)](a, b, c, out, N=256)
    want = [fma_fp32(*xs) for xs in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert out.tolist() == want
    assert (a * b + c).tolist() != want


def test_fma_over_arrays_is_the_definition():
    generator = np.random.default_rng(0)
    x, y, z = (
        generator.integers(0, 1 << 32, 3000, dtype=np.uint32).view(np.float32) for _ in range(3)
    )
    x[:1000] = generator.standard_normal(1000).astype(np.float32)
    y[:1000] = 1 + generator.integers(0, 99, 1000).astype(np.float32) * 2.0**-23
    z[:1000] = -x[:1000]  # all but the last bits cancel
    x[1000:1500] = generator.standard_normal(500).astype(np.float32) * 2.0**-70
    y[1000:1500] = generator.standard_normal(500).astype(np.float32) * 2.0**-70
    z[1000:1500] = generator.integers(0, 1 << 12, 500, dtype=np.uint32).view(np.float32)
    found = fused_multiply_add(x, y, z)
    for got, *values in zip(found.tolist(), x.tolist(), y.tolist(), z.tolist(), strict=True):
        want = fma_fp32(*values)
        assert np.float32(got).tobytes() == np.float32(want).tobytes() or (
            got != got and want != want
        )


def test_a_written_tree_gives_its_order():
    x, out = torch.randn(1024), torch.empty(1, 1)
    interpret(kernels.tree_sum)[(1,)](x, out, N=1024, LOG=10)
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    assert torch.equal(out[0], x)


def reduce(how, **options):
    x, out = torch.arange(16.0) + 1, torch.zeros(1)
    interpret(kernels.reduce, **options)[(1,)](x, out, N=16, HOW=how)
    return out.item()


@pytest.mark.parametrize(
    ("how", "allow", "value"),
    [
        ("sum", "reductions", 136.0),
        ("method", "reductions", 136.0),
        ("scan", "reductions", 136.0),
        ("exp", "approximations", None),
        ("divide", "approximations", None),
        ("atomic", "atomics", 0.0),
    ],
)
def test_what_has_no_bits_of_a_gpu_is_refused_unless_allowed(how, allow, value):
    with pytest.raises(UnsupportedError, match=f'allow=\\["{allow}"\\]') as caught:
        reduce(how)
    assert caught.value.remedy
    assert reduce(how, allow=[allow]) == value or value is None


def test_what_is_exact_runs():
    assert reduce("max") == 16.0
    assert reduce("integer") == 136.0
    assert reduce("exact") == (torch.tensor(256.0) / 3).sqrt().item()


def test_bf16_arithmetic_on_patterns_is_refused():
    with pytest.raises(UnsupportedError, match="received: bf16"):
        reduce("bf16")


def test_an_accumulator_that_the_compiler_would_move_is_refused():
    a = torch.randn(16, 16)
    with pytest.raises(UnsupportedError, match="pass the accumulator to"):
        interpret(kernels.late_accumulator)[(1,)](a, a, a.clone(), M=16)


@pytest.mark.parametrize(
    ("dtype", "precision", "half", "words"),
    [
        (torch.float32, "tf32x3", False, "TF32x3"),
        (torch.float16, "ieee", True, "fp16"),
        (torch.float8_e4m3fn, "ieee", False, "fp8e4nv"),
    ],
)
def test_other_products_are_refused(dtype, precision, half, words):
    a = torch.zeros(32, 32, dtype=dtype)
    with pytest.raises(UnsupportedError, match=words):
        interpret(kernels.other_dots)[(1,)](a, a, torch.zeros(32, 32), M=32, P=precision, HALF=half)


def test_wrong_settings_are_refused():
    with pytest.raises(UnsupportedError, match="cdna4"):
        interpret(kernels.fma, "cdna4")
    with pytest.raises(ArgumentError, match="everything"), interpreted(allow=["everything"]):
        pass
    tuned = triton.autotune([triton.Config({})], key=[])(kernels.fma)
    with pytest.raises(UnsupportedError, match=r"kernel\.fn"):
        interpret(tuned)


def stock():
    """Everything of Triton that a context replaces, and what a launch patches."""
    owners = (
        InterpreterBuilder,
        ReduceOps,
        JITFunction,
        InterpretedFunction,
        tl,
        tl.core,
        tl.math,
        tl.core.tensor,
    )
    return [dict(vars(owner)) for owner in owners] + [dict(vars(kernels))]


def test_contexts_nest_and_restore_everything():
    before = stock()
    with interpreted("tc24x8"):
        ampere = run(torch.bfloat16)[2]
        with interpreted("tc25x16"):
            hopper = run(torch.bfloat16)[2]
        assert np.array_equal(bits(run(torch.bfloat16)[2]), bits(ampere))
        assert stock() != before
    assert stock() == before
    assert np.array_equal(bits(ampere), bits(run(torch.bfloat16, "tc24x8")[2]))
    assert np.array_equal(bits(hopper), bits(run(torch.bfloat16, "tc25x16")[2]))
    assert not np.array_equal(bits(ampere), bits(hopper))
    assert stock() == before


def test_an_exception_restores_everything():
    before = stock()
    with pytest.raises(InterpreterError, match="a mistake of the kernel"):
        reduce("fail")
    with pytest.raises(UnsupportedError):
        reduce("sum")
    with pytest.raises(KeyError), interpreted():
        raise KeyError
    assert stock() == before


def test_two_threads_have_their_own_engines():
    want = {engine: bits(run(torch.bfloat16, engine)[2]) for engine in ("tc24x8", "tc25x16")}
    found, before, start = {}, stock(), threading.Barrier(2)

    def work(engine):
        start.wait()
        with interpreted(engine):
            found[engine] = [bits(run(torch.bfloat16)[2]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(engine,)) for engine in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine, expected in want.items():
        assert len(found[engine]) == 3
        assert all(np.array_equal(got, expected) for got in found[engine])
    assert stock() == before


def test_a_thread_without_a_context_keeps_stock_behaviour():
    caught = []

    def work():
        try:
            kernels.add_product(0)
        except RuntimeError as error:
            caught.append(str(error))

    with interpreted():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "outside of the scope of a kernel" in caught[0]


UNDER_TRITON_INTERPRET = """
import numpy as np, torch
from tests.certifying import test_interpreter as t
from isobit.certifying import interpreted
for dtype in (torch.bfloat16, torch.float32):
    stock = t.run(dtype, precision="ieee")[2]
    with interpreted("tc25x16"):
        ours = t.run(dtype, precision="ieee")[2]
    again = t.run(dtype, precision="ieee")[2]
    assert np.array_equal(t.bits(stock), t.bits(again))
    print(type(t.kernels.fma).__name__, int((t.bits(stock) != t.bits(ours)).sum()), t.bits(ours).sum())
"""


def test_under_triton_interpret_stock_bits_differ_and_ours_are_the_same():
    """TRITON_INTERPRET=1 before the kernels are decorated: the control."""
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", UNDER_TRITON_INTERPRET],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in found.stdout.splitlines()]
    want = [
        bits(run(dtype, "tc25x16", "ieee")[2]).sum() for dtype in (torch.bfloat16, torch.float32)
    ]
    assert [line[0] for line in lines] == ["InterpretedFunction"] * 2
    assert all(int(line[1]) > 0 for line in lines)
    assert [int(line[2]) for line in lines] == [int(total) for total in want]
