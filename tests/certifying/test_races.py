"""A missing barrier is found whatever the bits are; code with its barriers has no false alarm."""

import re

import numpy as np
import pytest

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.ptx import parse
from isobit.certifying.running.refusals import RaceError
from tests.certifying.snippets import run, text, values

X = np.arange(64, dtype=np.float32)
AT = "shl.b32 %at, %t, 2; mov.u32 %r1, memory; add.s32 %at, %at, %r1;\n"
OTHER = "xor.b32 %r2, %t, {lane}; shl.b32 %r2, %r2, 2; add.s32 %r2, %r2, %r1;\n"


def exchange(between, lane, after=""):
    """Each thread stores, then loads what thread `tid ^ lane` stored."""
    body = AT + OTHER.format(lane=lane) + "st.shared.b32 [%at], %a;\n" + between
    return body + "\nld.shared.b32 %d, [%r2];\n" + after


@pytest.mark.parametrize(
    ("between", "lane", "race"),
    [
        ("", 0, False),
        ("", 1, True),
        ("", 32, True),
        ("bar.sync 0;", 1, False),
        ("bar.sync 0;", 32, False),
        ("bar.warp.sync -1;", 1, False),
        ("bar.warp.sync -1;", 32, True),
    ],
)
def test_read_after_write(between, lane, race):
    body = exchange(between, lane)
    if not race:
        bits = run(body, X, threads=64, shared=256)[0]
        np.testing.assert_array_equal(bits.view(np.float32), X[np.arange(64) ^ lane])
        return
    with pytest.raises(RaceError, match=f"thread {lane} at PTX line") as caught:
        run(body, X, threads=64, shared=256)
    lines = text(body, (32,), threads=64, shared=256).splitlines()
    assert lines[caught.value.ptx_line - 1].startswith("ld.shared")
    assert lines[caught.value.other_line - 1].startswith("st.shared")


@pytest.mark.parametrize(("barrier", "race"), [("bar.sync 0;", False), ("", True)])
def test_write_after_read(barrier, race):
    body = exchange("bar.sync 0;", 32, f"{barrier}\nst.shared.b32 [%at], %d;")
    if race:
        with pytest.raises(RaceError, match="read by thread"):
            run(body, X, threads=64, shared=256)
    else:
        run(body, X, threads=64, shared=256)


def test_two_writes_of_one_byte():
    store = "mov.u32 %r1, memory; st.shared.b32 [%r1], {}; mov.b32 %d, %a;"
    with pytest.raises(RaceError, match="different values"):
        run(store.format("%a"), X, threads=64, shared=16)
    run(store.format("7"), X, threads=64, shared=16)  # the same value: no race
    bytes_apart = (
        "mov.u32 %r1, memory; add.s32 %r1, %r1, %t; st.shared.b8 [%r1], %a; mov.b32 %d, %a;"
    )
    run(bytes_apart, X, threads=64, shared=64)


COPY = AT + "ld.param.b64 %q, [p0]; mul.wide.u32 %w1, %t, 4; add.s64 %w1, %q, %w1;\n"
COPY += "cp.async.ca.shared.global [%at], [%w1], 4;\ncp.async.commit_group;\n"


@pytest.mark.parametrize(
    ("wait", "race"),
    [
        ("cp.async.wait_group 0; bar.sync 0;", None),
        ("bar.sync 0;", "copy by"),
        ("cp.async.wait_group 1; bar.sync 0;", "copy by"),
        ("cp.async.wait_group 0;", "write by"),
    ],
)
def test_asynchronous_copies(wait, race):
    body = COPY + OTHER.format(lane=32) + wait + "\nld.shared.b32 %d, [%r2];"
    if race is None:
        bits = run(body, X, threads=64, shared=256)[0]
        np.testing.assert_array_equal(bits.view(np.float32), X[np.arange(64) ^ 32])
    else:
        with pytest.raises(RaceError, match=race):
            run(body, X, threads=64, shared=256)


def test_a_copy_fills_with_zeros():
    body = COPY.replace("[%w1], 4;", "[%w1], 4, %r3;")
    body = "setp.lt.u32 %p1, %t, 8; selp.b32 %r3, 4, 0, %p1;\n" + body
    bits = run(
        body + "cp.async.wait_group 0;\nld.shared.b32 %d, [%at];", X, threads=64, shared=256
    )[0]
    np.testing.assert_array_equal(bits.view(np.float32), np.where(np.arange(64) < 8, X, 0))


@pytest.mark.parametrize(
    ("body", "race"),
    [
        (
            "mov.b32 %d, %a; mov.u32 %r1, %ctaid.x; mul.wide.u32 %w1, %r1, 128; add.s64 %o, %o, %w1;",
            False,
        ),
        ("mov.b32 %d, %a;", True),
        (
            "mov.u32 %r1, %ctaid.x; mul.wide.u32 %w1, %r1, 128; add.s64 %o, %o, %w1; ld.global.b32 %d, [%q];",
            True,
        ),
    ],
)
def test_programs_of_one_launch_are_not_ordered(body, race):
    machine = Machine(parse(text(body, (32,))))
    buffers = [Buffer(values(0), label="x"), Buffer(np.zeros(64, np.float32), label="out")]
    if race:
        with pytest.raises(RaceError, match="of another CTA"):
            machine.run((2,), buffers)
    else:
        machine.run((2,), buffers)
        machine.run((2,), buffers)  # a second launch comes after the first


def test_a_launch_of_another_kernel_comes_after_the_first():
    """What another kernel has written before is no race, however many programs read it."""
    own = "mov.u32 %r1, %ctaid.x; mul.wide.u32 %w1, %r1, 128; add.s64 %o, %o, %w1; mov.b32 %d, %a;"
    x = Buffer(values(0), label="x")
    first, second = (Buffer(np.zeros(8 * 32, np.float32), label="out") for _ in range(2))
    Machine(parse(text(own, (32,)))).run((8,), [x, first])
    Machine(parse(text(own, (32,)))).run((8,), [first, second])
    assert (second.element_names().reshape(8, 32) == x.element_names()).all()


# ---- a kernel of Triton -------------------------------------------------------------------------
def test_every_barrier_of_a_compiled_kernel_is_needed_or_harmless():
    """Deleting a bar.sync is a race, or changes nothing: never a silent difference."""
    pytest.importorskip("triton")
    from tests.certifying.triton_kernels import compiled, row_sum

    ptx, shared = compiled(row_sum, {"X": "*fp32", "Y": "*fp32"}, {"N": 512}, 80, num_warps=4)
    assert ptx.count("bar.sync") >= 2
    x = np.random.default_rng(0).standard_normal((2, 512)).astype(np.float32)

    def launch(source):
        y = Buffer(np.zeros(2, np.float32), label="Y")
        Machine(parse(source)).run((2,), [Buffer(x, label="X"), y], shared_bytes=shared)
        return y.data.copy(), y.element_names()

    values_, names = launch(ptx)
    np.testing.assert_allclose(values_, x.sum(1), rtol=1e-5)
    caught = 0
    for found in re.finditer(r"bar\.sync[^;]*;", ptx):
        try:
            other = launch(ptx[: found.start()] + ptx[found.end() :])
        except RaceError:
            caught += 1
        else:
            assert (other[1] == names).all()
    assert caught
