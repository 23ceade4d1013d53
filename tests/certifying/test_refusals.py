"""What the machine does not run is refused by name, with the PTX line; and memory is checked."""

import numpy as np
import pytest

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.ptx import parse
from isobit.certifying.running.refusals import (
    AddressError,
    DataAddressError,
    DataBranchError,
    DivergentBranchError,
    FloatAtomicError,
    OpcodeError,
)
from isobit.errors import ArgumentError, UnsupportedError
from tests.certifying.snippets import run, text, values

A, B, C = values(0), values(1), values(2)


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (
            DataBranchError,
            "setp.gt.f32 %p1, %a, %b; @%p1 bra END; st.global.b32 [%o], %c; END:",
            "%p1",
        ),
        (DataBranchError, "setp.gt.s32 %p1, %a, 5; @%p1 bra END; bar.sync 0; END:", "float data"),
        (
            DataBranchError,
            "cvt.rzi.s32.f32 %r1, %a; setp.eq.b32 %p1, %r1, 5; L: @%p1 bra L;",
            "%p1",
        ),
        (DataBranchError, "setp.gt.f32 %p1, %a, %b; @%p1 ld.global.b32 %d, [%o];", "%p1"),
        (DataBranchError, "setp.gt.f32 %p1, %a, %b; vote.sync.any.pred %p2, %p1, -1;", "vote"),
        (
            DataBranchError,
            "ex2.approx.f32 %r1, 0f40000000; setp.gt.f32 %p1, %r1, %r1; @%p1 ret;",
            "%p1",
        ),
        (
            DataAddressError,
            "cvt.u64.u32 %w1, %a; add.s64 %w1, %w1, %q; ld.global.b32 %d, [%w1];",
            "%w1",
        ),
        (DataAddressError, "shfl.sync.idx.b32 %d, %b, %a, 31, -1;", "lane"),
        (
            DivergentBranchError,
            "setp.lt.u32 %p1, %t, 7; @%p1 bra END; mov.b32 %d, %a; END:",
            "thread 0",
        ),
        (DivergentBranchError, "setp.lt.u32 %p1, %t, 7; @%p1 bar.sync 0;", "all threads"),
        (FloatAtomicError, "atom.global.add.f32 %d, [%o], %a;", "second kernel"),
        (FloatAtomicError, "red.global.add.noftz.bf16x2 [%o], %a;", "float atomic"),
        (OpcodeError, "atom.global.add.u32 %d, [%o], 1;", "integers"),
        (OpcodeError, "mov.u32 %d, %clock;", "clock"),
        (OpcodeError, "bar.sync 0, 16;", "some threads"),
        (OpcodeError, "cvt.rn.satfinite.e4m3x2.f32 %h1, %a, %b;", "number of operands"),
        (OpcodeError, "frobnicate.b32 %d, %a;", "frobnicate"),
        (AddressError, "ld.global.b32 %d, [%o+128];", "inside out"),
        (AddressError, "ld.global.b32 %d, [%o-4];", "out"),
        (AddressError, "ld.shared.b32 %d, [%t+64];", "shared memory"),
        (AddressError, "ld.global.b32 %d, [%o+2];", "aligned|inside"),
    ],
)
def test_planted(kind, body, words):
    with pytest.raises(kind, match=words) as caught:
        run(body, A, B, C)
    assert isinstance(caught.value, UnsupportedError)
    line = text(body).splitlines()[caught.value.ptx_line - 1]
    assert line == body or body.startswith(line)
    assert caught.value.remedy


def test_the_python_line_is_named():
    body = ".loc 1 42 7\nsetp.gt.f32 %p1, %a, %b;\n@%p1 bra END;\nbar.sync 0;\nEND:"
    program = text(body).rstrip() + '\n.file 1 "/somewhere/kernel.py"\n'
    arrays = [
        Buffer(each.view(np.uint32), label=str(i), concrete=False)
        for i, each in enumerate((A, B, C))
    ]
    with pytest.raises(DataBranchError, match=r"kernel\.py:42") as caught:
        Machine(parse(program)).run((1,), [*arrays, Buffer(np.zeros(32, np.float32))])
    assert caught.value.source == ("/somewhere/kernel.py", 42)


def test_integers_of_integer_buffers_may_decide():
    body = "setp.gt.s32 %p1, %a, -1; @%p1 bra END; mov.b32 %d, 1; END: mov.b32 %d, 2;"
    bits, _, _ = run(body, np.full(32, 3, np.int32), concrete=True)
    assert (bits == 2).all()
    looping = "END: setp.gt.s32 %p1, %a, 4; @%p1 bra END; mov.b32 %d, 2;"
    with pytest.raises(DataBranchError):
        run(looping, np.full(32, 3, np.int32))


def test_whole_warps_may_branch_apart():
    body = (
        "mov.b32 %d, 1; setp.lt.u32 %p1, %t, 32; @%p1 bra ELSE; add.rn.f32 %d, %a, %a; bra END; "
        "ELSE: mul.rn.f32 %d, %a, %a; END: bar.sync 0;"
    )
    x = np.arange(64, dtype=np.float32)
    bits = run(body, x, threads=64)[0].view(np.float32)
    np.testing.assert_array_equal(bits, np.where(np.arange(64) < 32, x * x, x + x))


def test_bits_alone_need_no_names():
    body = "setp.gt.f32 %p1, %a, %b; selp.b32 %d, %a, %b, %p1;"
    bits, names, _ = run(body, A, B, names=False)
    assert names is None
    np.testing.assert_array_equal(bits, np.where(A > B, A, B).view(np.uint32))


def test_overlapping_buffers_and_too_many_arguments():
    data = np.zeros(64, np.float32)
    machine = Machine(parse(text("mov.b32 %d, %a;", (32,))))
    with pytest.raises(ArgumentError, match="overlap"):
        machine.run((1,), [Buffer(data[:40]), Buffer(data[32:])])
    with pytest.raises(ArgumentError, match="at most"):
        machine.run((1,), [1, 2, 3])


def test_counts_and_grid():
    body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.z; mad.lo.s32 %d, %r2, 10, %r1;"
    body += "mul.wide.u32 %w1, %d, 128; add.s64 %o, %o, %w1;"
    machine = Machine(parse(text(body, ())))
    out = np.zeros(32 * 12, np.int32)
    machine.run((2, 1, 2), [Buffer(out, concrete=False)])
    assert [int(out[32 * i]) for i in (0, 1, 10, 11)] == [0, 1, 10, 11]
    assert machine.counts["mad.lo.s32"] == 4
    assert machine.executed == 4 * len(machine.program.instructions)


@pytest.mark.parametrize("size", [232449, 1 << 40, -1])
def test_more_shared_memory_than_a_gpu_has_is_refused_by_name(size):
    machine = Machine(parse(text("mov.b32 %d, %a;")))
    buffers = [Buffer(each.copy(), label=f"x{at}") for at, each in enumerate((A, B, C, C))]
    with pytest.raises(ArgumentError, match="232448") as caught:
        machine.run((1,), buffers, shared_bytes=size)
    assert f"shared_bytes={size}" in caught.value.received
    machine.run((1,), buffers, shared_bytes=232448)
