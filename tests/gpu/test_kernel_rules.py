"""Kernels keep the rules that make their order visible: in their source, and in the PTX of every launch.

Each check has planted kernels that break it.
"""

import pytest
import torch

pytest.importorskip("triton")

from isobit.foundation import backends
from isobit.ops.gpu.launching import run
from tests.gpu import wrong_kernels
from tests.gpu.kernel_rules import INTEGER_SUMS, SOURCES, Reading, broken_rules, kernels_of
from tests.gpu.operator_calls import DTYPES, ODD, SMALL, TARGETS
from tests.sweeps import mostly_full


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_sources_keep_the_rules(path):
    key = f"{path.parent.name}/{path.name}"
    assert broken_rules(path.read_text(), key in INTEGER_SUMS) == []


def test_all_kernels_are_read():
    import ast

    count = sum(len(list(kernels_of(ast.parse(path.read_text())))) for path in SOURCES)
    assert count >= 40


WRONG_LINES = {
    "total = tl.sum(x, 0)": "sum",
    "total = x.sum()": "sum",
    "total = tl.reduce(x, 0, add)": "reduce",
    "y = tl.cumsum(x, 0)": "cumsum",
    "tl.atomic_add(y, x)": "atomic_add",
    "y = tl.exp(x)": "approximation",
    "y = tl.math.rsqrt(x)": "approximation",
    "y = libdevice.tanh(x)": "approximation",
    "y = x / 3.0": "approximates",
    "y /= 3.0": "approximates",
    "y = tl.dot(x, x)": "accumulator",
    "y += tl.dot(x, x, max_num_imprecise_acc=1)": "moves",
    "y = tl.dot(x, x, max_num_imprecise_acc=1) + y": "moves",
}


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_wrong_line_is_found(line):
    source = f"@triton.jit\ndef wrong(x, y):\n    {line}\n"
    (found,) = broken_rules(source)
    assert WRONG_LINES[line] in found
    assert broken_rules(source.replace("@triton.jit\n", "")) == []


@pytest.mark.parametrize(
    ("parameters", "line"),
    [("x, M", "y = x"), ("x, M: tl.tensor", "y = x"), ("x", "M = tl.load(x)"), ("x", "M, y = x")],
)
def test_a_name_in_upper_case_is_a_constant(parameters, line):
    source = f"@triton.jit\ndef wrong({parameters}):\n    {line}\n"
    assert broken_rules(source) == ["wrong: M is not tl.constexpr, and in upper case"]
    right = "@triton.jit\ndef right(x, M: tl.constexpr):\n    N: tl.constexpr = M\n    y = x\n"
    assert broken_rules(right) == []


def read(calls, target):
    with backends.use(Reading(target)) as backend:
        for call in calls:
            call.results()
    return backend


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("at", mostly_full([0, 1], [0]))
@pytest.mark.sweep(8)
def test_ptx_keeps_the_rules(name, at):
    backend = read(SMALL[name](DTYPES[at]), TARGETS[2 * at])
    assert len(backend.read) >= 2
    assert backend.broken == []


@pytest.mark.full
@pytest.mark.parametrize("target", [*TARGETS, "sm_89", "sm_120"])
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
def test_ptx_keeps_the_rules_on_every_target(name, dtype, target):
    backend = read(ODD[name](dtype), target)
    assert len(backend.read) >= 2
    assert backend.broken == []


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (wrong_kernels.approximate, "approximate"),
        (wrong_kernels.atomic, "atomics"),
        (wrong_kernels.fused, "fused"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_wrong_kernel_is_found_in_its_ptx(kernel, words):
    backend = Reading("sm_80")
    with backends.use(backend):
        run(kernel, (1,), torch.ones(128), torch.ones(128), warps=4, N=128)
    assert any(words in each for each in backend.broken)


def test_a_kernel_that_may_be_fused_is_found():
    backend = Reading("sm_80", enable_fp_fusion=True)
    with backends.use(backend):
        run(wrong_kernels.product_and_sum, (1,), torch.ones(128), torch.ones(128), warps=4, N=128)
    assert any("fus" in each for each in backend.broken)
    allowed = Reading("sm_80")
    with backends.use(allowed):
        run(wrong_kernels.product_and_sum, (1,), torch.ones(128), torch.ones(128), warps=4, N=128)
    assert allowed.broken == []
