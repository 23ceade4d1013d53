"""Equal names mean equal bits for all inputs: each way that a float value can flow is in its name.

Every pair below differs in one place that a careless machine would not see; names must differ. The
random programs at the end look for a counterexample: equal names with different bits.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.certifying.names import names as nm
from isobit.certifying.names.maxima import maximum
from isobit.certifying.running.refusals import DataBranchError
from tests.certifying.snippets import names_of, run, values

DIFFERENT = {
    "a predicate kept as a number, turned round": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
        "setp.lt.f32 %p1, %a, %b; selp.b32 %r1, 1, 0, %p1; setp.eq.b32 %p2, %r1, 0; "
        "selp.b32 %d, %a, %c, %p2;",
    ),
    "a predicate kept as one of two numbers that are not zero": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
        "setp.lt.f32 %p1, %a, %b; selp.b32 %r1, 1, 2, %p1; setp.ne.b32 %p2, %r1, 0; "
        "selp.b32 %d, %a, %c, %p2;",
    ),
    "a predicate kept as a number, compared with one": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
        "setp.lt.f32 %p1, %a, %b; selp.b32 %r1, 1, 0, %p1; setp.ne.b32 %p2, %r1, 1; "
        "selp.b32 %d, %a, %c, %p2;",
    ),
    "order of additions": (
        "add.rn.f32 %r1, %a, %b; add.rn.f32 %d, %r1, %c;",
        "add.rn.f32 %r1, %b, %c; add.rn.f32 %d, %r1, %a;",
    ),
    "a fused product": (
        "mul.rn.f32 %r1, %a, %b; add.rn.f32 %d, %r1, %c;",
        "fma.rn.f32 %d, %a, %b, %c;",
    ),
    "flushing": ("add.rn.f32 %d, %a, %b;", "add.rn.ftz.f32 %d, %a, %b;"),
    "the side of a select": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %c, %a, %p1;",
    ),
    "the comparison of a select": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
        "setp.le.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
    ),
    "a select against its usual side": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
        "mov.b32 %d, %a;",
    ),
    "constants chosen by data": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, 1, 2, %p1;",
        "setp.lt.f32 %p1, %a, %c; selp.b32 %d, 1, 2, %p1;",
    ),
    "a guard that depends on data": (
        "mov.b32 %d, %c; setp.gt.f32 %p1, %a, 0f00000000; @%p1 add.rn.f32 %d, %a, %b;",
        "mov.b32 %d, %c; setp.gt.f32 %p1, %b, 0f00000000; @%p1 add.rn.f32 %d, %a, %b;",
    ),
    "the sense of a guard": (
        "mov.b32 %d, %c; setp.gt.f32 %p1, %a, 0f00000000; @%p1 mov.b32 %d, %b;",
        "mov.b32 %d, %c; setp.gt.f32 %p1, %a, 0f00000000; @!%p1 mov.b32 %d, %b;",
    ),
    "constants under a guard": (
        "mov.b32 %d, 1; setp.gt.f32 %p1, %a, 0f00000000; @%p1 mov.b32 %d, 2;",
        "mov.b32 %d, 1; setp.gt.f32 %p1, %b, 0f00000000; @%p1 mov.b32 %d, 2;",
    ),
    "a skip by a branch on data": (
        "mov.b32 %d, %c; setp.gt.f32 %p1, %a, %b; @%p1 bra END; add.rn.f32 %d, %a, %c; END:",
        "mov.b32 %d, %c; setp.ge.f32 %p1, %a, %b; @%p1 bra END; add.rn.f32 %d, %a, %c; END:",
    ),
    "predicates joined": (
        "setp.lt.f32 %p1, %a, %b; setp.lt.f32 %p2, %b, %c; and.pred %p3, %p1, %p2; selp.b32 %d, %a, %c, %p3;",
        "setp.lt.f32 %p1, %a, %b; setp.lt.f32 %p2, %b, %c; or.pred %p3, %p1, %p2; selp.b32 %d, %a, %c, %p3;",
    ),
    "an exponent moved by an integer addition": (
        "add.s32 %d, %a, 0x800000;",
        "add.s32 %d, %a, 0x1000000;",
    ),
    "a shift of float bits": ("shl.b32 %d, %a, 23;", "shl.b32 %d, %a, 22;"),
    "a mask of float bits": ("and.b32 %d, %a, 0x7FFFFFFF;", "and.b32 %d, %a, 0x7FFFFFFE;"),
    "truncation to bf16 against the value": ("and.b32 %d, %a, 0xFFFF0000;", "mov.b32 %d, %a;"),
    "truncation against rounding": (
        "shr.u32 %r1, %a, 16; shl.b32 %d, %r1, 16;",
        "cvt.rn.bf16.f32 %h1, %a; mov.b32 %d, {%h2, %h1}; and.b32 %d, %d, 0xFFFF0000;",
    ),
    "halves exchanged": ("prmt.b32 %d, %a, %b, 0x5410;", "prmt.b32 %d, %a, %b, 0x1054;"),
    "a byte": ("prmt.b32 %d, %a, %b, 0x3210;", "prmt.b32 %d, %a, %b, 0x3214;"),
    "a field of bits": ("bfe.u32 %d, %a, 23, 8;", "bfe.u32 %d, %a, 22, 8;"),
    "a sign above the type of a conversion": ("cvt.s16.u32 %d, %a;", "cvt.u16.u32 %d, %a;"),
    "a predicate's number below an extended sign": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %r1, -1, 0, %p1; cvt.s16.u32 %r2, %r1; setp.eq.b32 %p4, %r2, -1; "
        "selp.b32 %d, %a, %c, %p4;",
        "setp.lt.f32 %p1, %a, %b; selp.b32 %r1, -1, 0, %p1; cvt.u16.u32 %r2, %r1; setp.eq.b32 %p4, %r2, -1; "
        "selp.b32 %d, %a, %c, %p4;",
    ),
    "an integer of a float": ("cvt.rzi.s32.f32 %d, %a;", "cvt.rni.s32.f32 %d, %a;"),
    "the reading of 16 bits": (
        "mov.b32 {%h1, %h2}, %a; cvt.f32.bf16 %d, %h2;",
        "mov.b32 {%h1, %h2}, %a; cvt.f32.f16 %d, %h2;",
    ),
    "max of NaN": ("max.f32 %d, %a, %b;", "max.NaN.f32 %d, %a, %b;"),
    "max against a select": (
        "max.f32 %d, %a, %b;",
        "setp.gt.f32 %p1, %a, %b; selp.b32 %d, %a, %b, %p1;",
    ),
    "max of one value": ("max.f32 %d, %a, %a;", "mov.b32 %d, %a;"),
    "-inf in a plain max": (
        "max.f32 %d, %a, %b;",
        "max.f32 %r1, %a, 0fFF800000; max.f32 %d, %r1, %b;",
    ),
    "addition of zero": ("add.rn.f32 %d, %a, 0f00000000;", "mov.b32 %d, %a;"),
    "product with one": ("mul.rn.f32 %d, %a, 0f3F800000;", "mov.b32 %d, %a;"),
    "a value in a lane, times one": (
        "mov.b32 %r2, 0f3F800000; mov.b64 %w1, {%a, %b}; mov.b64 %w2, {%r2, %r2}; "
        "mul.rn.f32x2 %w3, %w1, %w2; mov.b64 {%d, %r4}, %w3;",
        "mov.b32 %d, %a;",
    ),
    "a maximum in a lane, and plus zero": (
        "max.f32 %r1, %a, %b; mov.b32 %r2, 0f00000000; mov.b64 %w1, {%r1, %b}; mov.b64 %w2, {%r2, %r2}; "
        "add.rn.f32x2 %w3, %w1, %w2; mov.b64 {%d, %r4}, %w3;",
        "max.f32 %d, %a, %b;",
    ),
    "a maximum in a lane, times one and flushed": (
        "max.f32 %r1, %a, %b; mov.b32 %r2, 0f3F800000; mov.b64 %w1, {%r1, %b}; mov.b64 %w2, {%r2, %r2}; "
        "mul.rn.ftz.f32x2 %w3, %w1, %w2; mov.b64 {%d, %r4}, %w3;",
        "max.f32 %d, %a, %b;",
    ),
    "an approximation": ("div.rn.f32 %d, %a, %b;", "div.full.f32 %d, %a, %b;"),
    "another lane": (
        "shfl.sync.bfly.b32 %d, %a, 1, 31, -1;",
        "shfl.sync.bfly.b32 %d, %a, 2, 31, -1;",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_flows_have_different_names(case):
    first, second = (names_of(body) for body in DIFFERENT[case])
    assert (first != second).all()


EQUAL = {
    "a predicate kept as a number": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
        "setp.lt.f32 %p1, %a, %b; selp.b32 %r1, 1, 0, %p1; setp.ne.b32 %p2, %r1, 0; "
        "selp.b32 %d, %a, %c, %p2;",
    ),
    "a predicate kept as a 16-bit number, moved and compared the other way": (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;",
        "setp.lt.f32 %p1, %a, %b; selp.b16 %h1, 0, -1, %p1; mov.b16 %h2, %h1; "
        "setp.eq.b16 %p2, %h2, 0; selp.b32 %d, %a, %c, %p2;",
    ),
    "sides of an addition": ("add.rn.f32 %d, %a, %b;", "add.rn.f32 %d, %b, %a;"),
    "sides of a fused product": ("fma.rn.f32 %d, %a, %b, %c;", "fma.rn.f32 %d, %b, %a, %c;"),
    "grouping of a maximum": (
        "max.f32 %r1, %a, %b; max.f32 %d, %r1, %c;",
        "max.f32 %r1, %c, %b; max.f32 %r2, %a, %b; max.f32 %d, %r1, %r2;",
    ),
    "-inf in a max that keeps NaN": (
        "max.NaN.f32 %d, %a, %b;",
        "max.NaN.f32 %r1, %a, 0fFF800000; max.NaN.f32 %d, %r1, %b;",
    ),
    "a maximum beside a sum in two lanes": (
        "max.f32 %r1, %a, %b; mov.b32 %r2, 0f3F800000; mov.b32 %r3, 0f80000000; mov.b64 %w1, {%c, %r1}; "
        "mov.b64 %w2, {%b, %r2}; mul.rn.f32x2 %w3, %w1, %w2; mov.b64 %w4, {%a, %r3}; "
        "mov.b64 %w5, {%b, %r2}; mul.rn.f32x2 %w4, %w5, %w4; add.rn.f32x2 %w3, %w3, %w4; "
        "mov.b64 {%r4, %d}, %w3;",
        "max.f32 %d, %a, %b;",
    ),
    "packing and unpacking": (
        "mov.b32 {%h1, %h2}, %a; mov.b32 %d, {%h1, %h2};",
        "and.b32 %r1, %a, 0xFFFF; and.b32 %r2, %a, 0xFFFF0000; or.b32 %d, %r1, %r2;",
    ),
    "packing by shifts": (
        "shr.u32 %r1, %a, 16; shl.b32 %r2, %b, 16; or.b32 %d, %r1, %r2;",
        "prmt.b32 %d, %a, %b, 0x5432;",
    ),
    "two ways to widen a bf16": (
        "cvt.rn.bf16.f32 %h1, %a; cvt.f32.bf16 %d, %h1;",
        "cvt.rn.bf16x2.f32 %r1, %a, %b; and.b32 %d, %r1, 0xFFFF0000;",
    ),
    "widening in the addition": (
        "mov.b32 {%h1, %h2}, %a; add.rn.f32.bf16 %d, %h2, %c;",
        "mov.b32 {%h1, %h2}, %a; cvt.f32.bf16 %r1, %h2; add.rn.f32 %d, %r1, %c;",
    ),
    "a branch on data that only skips arithmetic": (
        "mov.b32 %d, %c; setp.gt.f32 %p1, %a, %b; @%p1 bra END; mul.rn.f32 %r5, %a, %a; "
        "add.rn.f32 %d, %r5, %c; END:",
        "mov.b32 %d, %c; setp.gt.f32 %p1, %a, %b; mul.rn.f32 %r5, %a, %a; @!%p1 add.rn.f32 %d, %r5, %c;",
    ),
    "two sides of a branch on data": (
        "setp.gt.f32 %p1, %a, %b; @%p1 bra ELSE; add.rn.f32 %r5, %a, %b; mul.rn.f32 %d, %r5, %c; "
        "bra END; ELSE: sub.rn.f32 %d, %a, %b; END:",
        "setp.gt.f32 %p1, %a, %b; add.rn.f32 %r5, %a, %b; mul.rn.f32 %r6, %r5, %c; "
        "sub.rn.f32 %r7, %a, %b; selp.b32 %d, %r7, %r6, %p1;",
    ),
    "constants folded": (
        "mov.b32 %r1, 0f3F800000; add.rn.f32 %r2, %r1, %r1; mul.rn.f32 %d, %a, %r2;",
        "mul.rn.f32 %d, %a, 0f40000000;",
    ),
    "a guard that is known": (
        "setp.lt.u32 %p1, %t, 99; mov.b32 %d, %b; @%p1 mov.b32 %d, %a;",
        "mov.b32 %d, %a;",
    ),
    "bytes through shared memory": (
        "shl.b32 %at, %t, 2; mov.u32 %r1, memory; add.s32 %at, %at, %r1; st.shared.b32 [%at], %a; "
        "ld.shared.b8 %h1, [%at+2]; cvt.u32.u16 %d, %h1;",
        "bfe.u32 %r9, %a, 0, 1; prmt.b32 %d, %a, 0, 0x4442;",
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_exact_rules_give_equal_names(case):
    first, second = (names_of(body, shared=256) for body in EQUAL[case])
    assert (first == second).all()
    bits = [run(body, values(3), values(4), values(5), shared=256)[0] for body in EQUAL[case]]
    np.testing.assert_array_equal(*bits)


def test_a_store_under_a_guard_of_data_is_refused():
    body = "setp.gt.f32 %p1, %a, %b; @%p1 st.global.b32 [%o], %c; mov.b32 %d, %c;"
    with pytest.raises(DataBranchError, match="float data"):
        names_of(body)


def test_bytes_stored_apart():
    """A byte store changes the name of its half, and a byte that is loaded keeps its name."""
    start = (
        "shl.b32 %at, %t, 2; mov.u32 %r1, memory; add.s32 %at, %at, %r1; st.shared.b32 [%at], %a; "
    )
    changed = names_of(start + "st.shared.b8 [%at+1], %b; ld.shared.b32 %d, [%at];", shared=256)
    other = names_of(start + "st.shared.b8 [%at], %b; ld.shared.b32 %d, [%at];", shared=256)
    assert (changed != names_of("mov.b32 %d, %a;")).all()
    assert (changed != other).all()
    kept = names_of(
        start + "st.shared.b8 [%at+1], %b; ld.shared.b8 %h1, [%at+1]; cvt.u32.u16 %d, %h1;",
        shared=256,
    )
    assert (kept == names_of("prmt.b32 %d, %b, 0, 0x4440;")).all()


def test_memory_that_was_never_written_has_names_of_its_own():
    body = "mov.u32 %at, memory; ld.shared.b32 %d, [%at];"
    first, second = (names_of(body, shared=16) for _ in range(2))
    assert not set(first.tolist()) & set(second.tolist())
    machine = run(body, values(0), shared=16)[2]
    assert any("never written" in each for each in machine.facts)
    assert any("register" in each for each in run("mov.b32 %d, %r3;", values(0))[2].facts)


def test_maxima_are_sets():
    x = nm.input_names("x", 64, 32)
    left = right = x[:1]
    for each in x:
        left = maximum(left, each[None])
    for each in x[::-1]:
        right = maximum(maximum(right, each[None]), right)
    assert left == right
    assert maximum(left, x[:1]) == left
    assert maximum(left, left, "min") != left


# ---- random programs ----------------------------------------------------------------------------
LINES = st.sampled_from(
    [
        "add.rn.f32 {d}, {x}, {y};",
        "sub.rn.f32 {d}, {x}, {y};",
        "mul.rn.f32 {d}, {x}, {y};",
        "fma.rn.f32 {d}, {x}, {y}, {z};",
        "max.f32 {d}, {x}, {y};",
        "min.f32 {d}, {x}, {y};",
        "neg.f32 {d}, {x};",
        "and.b32 {d}, {x}, 0xFFFF0000;",
        "and.b32 {d}, {x}, {y};",
        "or.b32 {d}, {x}, {y};",
        "xor.b32 {d}, {x}, {y};",
        "shl.b32 {d}, {x}, 16;",
        "shr.u32 {d}, {x}, 16;",
        "add.s32 {d}, {x}, {y};",
        "prmt.b32 {d}, {x}, {y}, 0x5410;",
        "prmt.b32 {d}, {x}, {y}, 0x7610;",
        "cvt.rn.bf16x2.f32 {d}, {x}, {y};",
        "setp.lt.f32 %p1, {x}, {y}; selp.b32 {d}, {x}, {z}, %p1;",
        "setp.gt.f32 %p1, {x}, 0f00000000; @%p1 mov.b32 {d}, {y};",
        "mov.b32 {d}, 0f00000000;",
        "shfl.sync.bfly.b32 {d}, {x}, 1, 31, -1;",
    ]
)
REGISTERS = ("%a", "%b", "%c", "%r1", "%r2")
REGISTER = st.sampled_from(REGISTERS)
STATEMENT = st.builds(
    lambda line, d, x, y, z: line.format(d=d, x=x, y=y, z=z),
    LINES,
    st.sampled_from(("%r1", "%r2")),
    REGISTER,
    REGISTER,
    REGISTER,
)
PROGRAM = st.lists(STATEMENT, min_size=1, max_size=5)
START = "mov.b32 %r1, %a; mov.b32 %r2, %b; "


@settings(max_examples=60)
@given(PROGRAM, PROGRAM, st.integers(0, 1000))
def test_equal_names_mean_equal_bits(first, second, seed):
    """Of two random programs, and of a program with one line of another put in."""
    mutated = [*first[:-1], second[0], *first[-1:]]
    inputs = [values(seed + i) for i in range(3)]
    found = []
    for program in (first, second, mutated, list(reversed(first))):
        bits, names, _ = run(START + " ".join(program) + " mov.b32 %d, %r1;", *inputs)
        found.append((bits, names))
    for i, (bits, names) in enumerate(found):
        for other_bits, other_names in found[:i]:
            equal = names[:, None] == other_names[None, :]
            assert (bits[:, None] == other_bits[None, :])[equal].all()
