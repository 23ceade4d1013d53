"""tcgen05.ld: a copy of its result before tcgen05.wait::ld is no race, and every use of result or copy is.

Triton's tf32x3 emits the pairs `mov.b64 %rd, {%r1, %r2}` before the wait. ptxas makes no instruction of them: the
additions after the wait read the registers of LDTM.
"""

import re

import numpy as np
import pytest
import triton
import triton.language as tl

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.ptx import parse
from isobit.certifying.running.refusals import RaceError
from tests.certifying import asynchronous_kernels as kernels

SIZE = 64


@triton.jit
def thrice(A, B, C, SIZE: tl.constexpr):
    """C = A @ B in three tf32 products, two blocks of K."""
    m, k = tl.arange(0, SIZE), tl.arange(0, 32)
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, SIZE, 32):
        a = tl.load(A + m[:, None] * SIZE + (start + k)[None, :])
        b = tl.load(B + (start + k)[:, None] * SIZE + m[None, :])
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    tl.store(C + m[:, None] * SIZE + m[None, :], acc)


def run(edit=lambda ptx: ptx):
    types = tuple((name, "*fp32") for name in "ABC")
    ptx, shared = kernels.compiled(thrice, 100, types, (("SIZE", SIZE),), 1, 4)
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    out = Buffer(np.full((SIZE, SIZE), np.nan, np.float32), label="C")
    machine = Machine(parse(edit(ptx)), engine=kernels.ENGINE)
    machine.run((1,), [Buffer(a, label="A"), Buffer(b, label="B"), out], shared_bytes=shared)
    return out.data, a.astype(np.float64) @ b.astype(np.float64)


def copies_before_the_wait(ptx):
    """Return the text between the first tcgen05.ld whose result is copied and its wait."""
    for found in re.finditer(r"tcgen05\.ld\..*?tcgen05\.wait::ld", ptx, re.DOTALL):
        if "mov.b64" in found[0]:
            return found
    raise AssertionError("Triton copies nothing before the wait")


def test_copies_are_no_race():
    found, exact = run()
    assert np.abs(found - exact).max() < 1e-4  # tf32 alone would be off by 1e-2


def test_a_computation_with_a_copy_before_the_wait_is_a_race():
    def use(ptx):
        span = copies_before_the_wait(ptx)
        copy = re.search(r"mov\.b64\s+(%rd\d+), ", span[0])[1]
        at = span.end() - len("tcgen05.wait::ld")
        return f"{ptx[:at]}add.s64 {copy}, {copy}, 1;\n{ptx[at:]}"

    with pytest.raises(RaceError, match="not ready"):
        run(use)


def test_without_the_wait_the_copies_are_never_ready():
    def remove(ptx):
        span = copies_before_the_wait(ptx)
        at = span.end() - len("tcgen05.wait::ld")
        return ptx[:at] + ptx[at:].replace("tcgen05.wait::ld.sync.aligned;", "", 1)

    with pytest.raises(RaceError, match="not ready"):
        run(remove)


def test_a_copy_under_a_guard_is_a_race():
    def guard(ptx):
        span = copies_before_the_wait(ptx)
        at = span.start() + span[0].index("mov.b64")
        return f"{ptx[:at]}@%p1 {ptx[at:]}"

    with pytest.raises(RaceError, match="not ready"):
        run(guard)
