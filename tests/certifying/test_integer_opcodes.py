"""Integer opcodes, moves, comparisons and warp instructions have the bits that Python integers give."""

import numpy as np
import pytest

from isobit.certifying.names import names as nm
from tests.certifying.snippets import run

RNG = np.random.default_rng(7)
X, Y = (RNG.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32) for _ in range(2))
Y[:4] = [1, 2, 0xFFFFFFFF, 7]
X[:4] = [0, 0x80000000, 5, 0xFFFFFFF9]


def signed(value, width=32):
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def clamped_to_16(x, y):
    return int(min(max(np.float32(signed(x)), -32768), 32767))


def toward_zero(x, y):
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %d, %a, %b;", lambda x, y: x + y),
        ("sub.s32 %d, %a, %b;", lambda x, y: x - y),
        ("mul.lo.s32 %d, %a, %b;", lambda x, y: x * y),
        ("mul.hi.u32 %d, %a, %b;", lambda x, y: x * y >> 32),
        ("mul.hi.s32 %d, %a, %b;", lambda x, y: signed(x) * signed(y) >> 32),
        ("mad.lo.s32 %d, %a, %b, %a;", lambda x, y: x * y + x),
        ("div.u32 %d, %a, %b;", lambda x, y: x // y),
        ("div.s32 %d, %a, %b;", lambda x, y: toward_zero(signed(x), signed(y))),
        ("rem.u32 %d, %a, %b;", lambda x, y: x % y),
        (
            "rem.s32 %d, %a, %b;",
            lambda x, y: signed(x) - toward_zero(signed(x), signed(y)) * signed(y),
        ),
        ("min.s32 %d, %a, %b;", lambda x, y: min(signed(x), signed(y))),
        ("max.u32 %d, %a, %b;", lambda x, y: max(x, y)),
        ("neg.s32 %d, %a;", lambda x, y: -x),
        ("and.b32 %d, %a, %b;", lambda x, y: x & y),
        ("or.b32 %d, %a, 0xF0;", lambda x, y: x | 0xF0),
        ("xor.b32 %d, %a, -1;", lambda x, y: ~x),
        ("not.b32 %d, %a;", lambda x, y: ~x),
        ("shl.b32 %d, %a, 7;", lambda x, y: x << 7),
        ("shl.b32 %d, %a, 40;", lambda x, y: 0),
        ("shr.u32 %d, %a, 16;", lambda x, y: x >> 16),
        ("shr.s32 %d, %a, 31;", lambda x, y: signed(x) >> 31),
        ("bfe.u32 %d, %a, 4, 14;", lambda x, y: x >> 4 & 0x3FFF),
        ("bfe.s32 %d, %a, 4, 8;", lambda x, y: signed(x >> 4, 8)),
        ("bfi.b32 %d, %a, %b, 8, 4;", lambda x, y: y & ~0xF00 | (x & 15) << 8),
        ("popc.b32 %d, %a;", lambda x, y: x.bit_count()),
        ("clz.b32 %d, %a;", lambda x, y: 32 - x.bit_length()),
        ("brev.b32 %d, %a;", lambda x, y: int(f"{x:032b}"[::-1], 2)),
        ("prmt.b32 %d, %a, %b, 0x7632;", lambda x, y: x >> 16 | y >> 16 << 16),
        ("shf.l.wrap.b32 %d, %a, %b, 9;", lambda x, y: (y << 32 | x) << 9 >> 32),
        ("lop3.b32 %d, %a, %b, %a, 0x3c;", lambda x, y: x ^ y),
        (
            "setp.lt.s32 %p1, %a, %b; selp.b32 %d, %a, %b, %p1;",
            lambda x, y: min(signed(x), signed(y)),
        ),
        ("setp.hs.u32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", lambda x, y: x >= y),
        (
            "setp.lt.s32 %p1, %a, 0; setp.eq.and.s32 %p2|%p3, %a, %a, %p1; selp.b32 %d, 1, 0, %p3;",
            lambda x, y: 0,
        ),
        ("mov.b32 {%h1, %h2}, %a; mov.b32 %d, {%h2, %h1};", lambda x, y: x >> 16 | x << 16),
        ("cvt.u16.u32 %h1, %a; cvt.u32.u16 %d, %h1;", lambda x, y: x & 0xFFFF),
        ("cvt.u16.u32 %h1, %a; cvt.s32.s16 %d, %h1;", lambda x, y: signed(x, 16)),
        ("cvt.s16.u32 %d, %a;", lambda x, y: signed(x, 16)),
        ("cvt.rn.f32.s32 %r1, %a; cvt.rzi.s16.f32 %d, %r1;", clamped_to_16),
        (
            "cvt.s64.s32 %w1, %a; shr.u64 %w2, %w1, 32; cvt.u32.u64 %d, %w2;",
            lambda x, y: signed(x) >> 32,
        ),
        (
            "mul.wide.s32 %w1, %a, %b; shr.u64 %w2, %w1, 32; cvt.u32.u64 %d, %w2;",
            lambda x, y: signed(x) * signed(y) >> 32,
        ),
        ("{ .reg .b32 %a2; add.s32 %a2, %a, 1; mov.b32 %d, %a2; }", lambda x, y: x + 1),
        (
            "mov.b32 %d, %a; setp.eq.b32 %p1, %t, 3; @%p1 mov.b32 %d, %b; @!%p1 add.s32 %d, %d, 1;",
            None,
        ),
    ],
)
def test_bits_and_no_names(body, expected):
    """Concrete integers: right bits, and results that are constants."""
    bits, names, _ = run(body, X, Y, concrete=True)
    pairs = zip(X.tolist(), Y.tolist(), strict=True)
    if expected is None:
        wanted = [y if i == 3 else x + 1 for i, (x, y) in enumerate(pairs)]
    else:
        wanted = [int(expected(x, y)) for x, y in pairs]
    assert bits.tolist() == [each & 0xFFFFFFFF for each in wanted]
    assert (names == nm.constant(bits)).all()


@pytest.mark.parametrize(
    "body",
    [
        "add.s32 %d, %a, %b;",
        "mul.lo.s32 %d, %a, %b;",
        "bfe.u32 %d, %a, 4, 14;",
        "shl.b32 %d, %a, 7;",
        "xor.b32 %d, %a, %b;",
        "prmt.b32 %d, %a, %b, 0x3210;",
        "lop3.b32 %d, %a, %b, %a, 0x3c;",
    ],
)
def test_integer_operations_on_float_bits_are_named(body):
    """The concrete value never names a result that depends on data."""
    names = run(body, X, Y)[1]
    assert not nm.is_constant(names).any()
    assert np.unique(names).size == names.size
    assert (names == run(body, Y, X)[1]).all(), "names do not depend on the values"


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("idx", 3, 31, lambda lane: 3),
        ("up", 1, 0, lambda lane: max(lane - 1, 0)),
        ("down", 2, 31, lambda lane: lane + 2 if lane + 2 < 32 else lane),
        ("idx", 1, 0x1C1F, lambda lane: lane // 4 * 4 + 1),
    ],
)
def test_shuffles(mode, by, clamp, source):
    body = f"shfl.sync.{mode}.b32 %d|%p1, %a, {by}, {clamp}, -1;"
    bits, names, _ = run(body, X)
    lanes = np.array([source(lane) for lane in range(32)])
    np.testing.assert_array_equal(bits, X[lanes])
    assert (names == run("mov.b32 %d, %a;", X)[1][lanes]).all()


def test_votes_and_reductions():
    bits = run("setp.lt.u32 %p1, %t, 5; vote.sync.ballot.b32 %d, %p1, -1;", X, concrete=True)[0]
    assert (bits == 31).all()
    total = run("redux.sync.add.s32 %d, %a, -1;", X, concrete=True)[0]
    assert (total == int(X.astype(np.uint64).sum()) & 0xFFFFFFFF).all()
    values = np.arange(32, dtype=np.float32)
    bits, names, _ = run("redux.sync.max.NaN.f32 %d, %a, -1;", values)
    assert (bits.view(np.float32) == 31).all()
    assert np.unique(names).size == 1


def test_special_registers():
    bits = run("mov.u32 %r1, %laneid; mov.u32 %r2, %warpid; mad.lo.s32 %d, %r2, 100, %r1;", X)[0]
    assert bits.tolist() == list(range(32))
