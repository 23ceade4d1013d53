"""Predicates that a compiler packs into the bits of a number keep their names; a neighbour's bit does not get them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.certifying.machine import packed
from tests.certifying.snippets import names_of, run, values

TESTS = "setp.lt.f32 %p1, %a, %b; setp.nan.f32 %p2, %c, %c; setp.gt.f32 %p3, %b, %c; "
PACKED = (  # p1 in bit 0, p2 in bit 1, p3 in bit 2, as LLVM packs them
    TESTS + "selp.b16 %h1, 1, 0, %p1; selp.b16 %h2, -1, 0, %p2; shl.b16 %h2, %h2, 1; or.b16 %h1, %h1, %h2; "
    "and.b16 %h1, %h1, 3; selp.b16 %h3, 1, 0, %p3; shl.b16 %h3, %h3, 2; or.b16 %h1, %h1, %h3; "
)  # fmt: skip
CHOOSE = "selp.b32 %d, %a, %c, {};"


def direct(predicate):
    return TESTS + CHOOSE.format(predicate)


TAKEN_OUT = {
    "a bit of 16": ("and.b16 %h4, %h1, 2; setp.ne.b16 %p4, %h4, 0; ", "%p2"),
    "a bit of 32": (
        "cvt.u32.u16 %r1, %h1; shr.u32 %r1, %r1, 2; and.b32 %r1, %r1, 1; setp.ne.b32 %p4, %r1, 0; ",
        "%p3",
    ),
    "a bit of 64": (
        "cvt.u32.u16 %r1, %h1; shl.b32 %r1, %r1, 16; cvt.u64.u32 %w1, %r1; shr.u64 %w1, %w1, 17; "
        "and.b64 %w1, %w1, 1; setp.ne.b64 %p4, %w1, 0; ",
        "%p2",
    ),
    "compared with one": ("and.b16 %h4, %h1, 1; setp.eq.b16 %p4, %h4, 1; ", "%p1"),
    "the uppermost bit, as a sign": ("and.b16 %h4, %h1, 4; shl.b16 %h4, %h4, 13; setp.lt.s16 %p4, %h4, 0; ", "%p3"),
    "a sign that is extended": (
        "shl.b16 %h4, %h1, 14; cvt.s32.s16 %r1, %h4; shr.s32 %r1, %r1, 31; setp.eq.b32 %p4, %r1, -1; ",
        "%p2",
    ),
    "the lower part of a word": (
        "cvt.u32.u16 %r1, %h1; shl.b32 %r1, %r1, 15; cvt.u16.u32 %h4, %r1; setp.ne.b16 %p4, %h4, 0; ",
        "%p1",
    ),
    "turned twice": ("not.b16 %h4, %h1; and.b16 %h4, %h4, 1; setp.eq.b16 %p4, %h4, 0; ", "%p1"),
    "turned by ones": ("xor.b16 %h4, %h1, 6; and.b16 %h4, %h4, 4; setp.eq.b16 %p4, %h4, 0; ", "%p3"),
    "turned by ones on the left": (
        "mov.b16 %h4, 6; xor.b16 %h4, %h4, %h1; and.b16 %h4, %h4, 4; setp.eq.b16 %p4, %h4, 0; ",
        "%p3",
    ),
    "with what is twice there, and so nothing": (
        "xor.b16 %h4, %h1, %h1; or.b16 %h4, %h4, %h1; and.b16 %h4, %h4, 2; setp.ne.b16 %p4, %h4, 0; ",
        "%p2",
    ),
    "under a guard that is known": (
        "setp.lt.u32 %p5, %t, 99; mov.b16 %h4, 0; @%p5 and.b16 %h4, %h1, 1; setp.ne.b16 %p4, %h4, 0; ",
        "%p1",
    ),
    "through a register that is its own target": (
        "shr.u16 %h1, %h1, 1; and.b16 %h1, %h1, 1; setp.ne.b16 %p4, %h1, 0; ",
        "%p2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN_OUT)
def test_a_bit_that_is_taken_out_is_its_predicate(case):
    body, predicate = TAKEN_OUT[case]
    body = PACKED + body + CHOOSE.format("%p4")
    assert (names_of(body) == names_of(direct(predicate))).all()
    others = {"%p1", "%p2", "%p3"} - {predicate}
    assert all((names_of(body) != names_of(direct(other))).all() for other in others)
    bits = [run(each, values(3), values(4), values(5))[0] for each in (body, direct(predicate))]
    np.testing.assert_array_equal(*bits)


def test_without_the_bits_a_neighbour_shows_in_the_name(monkeypatch):
    """The control: what was before. The name of the whole word is in that of its bit."""
    monkeypatch.setattr(packed, "keep", lambda *_: None)
    body, predicate = TAKEN_OUT["a bit of 16"]
    body = PACKED + body + CHOOSE.format("%p4")
    assert (names_of(body) != names_of(direct(predicate))).all()


NO_BIT = {  # what is taken out, and which predicate it is all the same
    "a neighbour's bit": ("and.b16 %h4, %h1, 4; setp.ne.b16 %p4, %h4, 0; ", "%p3"),
    "two bits": ("and.b16 %h4, %h1, 3; setp.ne.b16 %p4, %h4, 0; ", None),
    "two bits in one place": (
        "shl.b16 %h4, %h1, 1; or.b16 %h4, %h4, %h1; and.b16 %h4, %h4, 2; setp.ne.b16 %p4, %h4, 0; ",
        None,
    ),
    "turned once": ("and.b16 %h4, %h1, 2; setp.eq.b16 %p4, %h4, 0; ", None),
    "under a guard that depends on data": (
        "and.b16 %h4, %h1, 2; @%p3 and.b16 %h4, %h1, 1; setp.ne.b16 %p4, %h4, 0; ",
        None,
    ),
    "in some threads only": (
        "setp.lt.u32 %p5, %t, 9; and.b16 %h4, %h1, 2; @%p5 add.s16 %h4, %h1, 7; setp.ne.b16 %p4, %h4, 0; ",
        "%p2",
    ),
    "an amount that is not a number": (
        "mov.b32 %r1, 1; shr.u16 %h4, %h1, %r1; and.b16 %h4, %h4, 1; setp.ne.b16 %p4, %h4, 0; ",
        None,
    ),
    "compared with what it never is": ("and.b16 %h4, %h1, 2; setp.ne.b16 %p4, %h4, 1; ", None),
}


@pytest.mark.parametrize("case", NO_BIT)
def test_what_is_not_the_bit_of_a_predicate_has_another_name(case):
    body, predicate = NO_BIT[case]
    found = run(PACKED + body + CHOOSE.format("%p4"), values(3), values(4), values(5))[1]
    for other in {"%p1", "%p2", "%p3"} - {predicate}:
        assert (found != names_of(direct(other))).all()
    if case == "in some threads only":
        same = found == names_of(direct(predicate))
        assert not same[:9].any()
        assert same[9:].all()


def test_a_bit_that_is_never_set_is_no_choice():
    body = PACKED + "and.b16 %h4, %h1, 8; setp.ne.b16 %p4, %h4, 0; " + CHOOSE.format("%p4")
    assert (names_of(body) == names_of("mov.b32 %d, %c;")).all()


# Random programs over three numbers; each ends with a comparison that chooses.
LINE = st.builds(
    lambda line, d, x, y, n, p: line.format(d=d, x=x, y=y, n=n, p=p),
    st.sampled_from(
        [
            "selp.b{{w}} {d}, 1, 0, {p};",
            "selp.b{{w}} {d}, -1, 0, {p};",
            "selp.b{{w}} {d}, {n}, 5, {p};",
            "shl.b{{w}} {d}, {x}, {n};",
            "shr.u{{w}} {d}, {x}, {n};",
            "shr.s{{w}} {d}, {x}, {n};",
            "or.b{{w}} {d}, {x}, {y};",
            "and.b{{w}} {d}, {x}, {y};",
            "and.b{{w}} {d}, {x}, {n};",
            "xor.b{{w}} {d}, {x}, {y};",
            "not.b{{w}} {d}, {x};",
            "mov.b{{w}} {d}, {n};",
            "@{p} shl.b{{w}} {d}, {x}, {n};",
            "setp.lt.u32 %p8, %t, 9; @%p8 or.b{{w}} {d}, {x}, {n};",
        ]
    ),
    *[st.sampled_from(("{v}1", "{v}2", "{v}3"))] * 3,
    st.sampled_from((0, 1, 2, 3, 4, 15)),
    st.sampled_from(("%p1", "%p2", "%p3")),
)
PROGRAM = st.builds(
    lambda lines, width, how, n: (
        TESTS
        + " ".join(f"mov.b{width} {{v}}{i}, {i};" for i in (1, 2, 3))
        + "selp.b{w} {v}1, 1, 0, %p1; selp.b{w} {v}2, -2, 0, %p2; "
        + " ".join(lines)
        + f" setp.{how}{width} %p4, {{v}}1, {n}; "
        + CHOOSE.format("%p4")
    ).replace("{w}", str(width)).replace("{v}", {16: "%h", 32: "%r", 64: "%w"}[width]),
    st.lists(LINE, max_size=6),
    st.sampled_from((16, 32, 64)),
    st.sampled_from(("ne.b", "eq.b", "lt.s", "gt.u")),
    st.sampled_from((0, 1, 2)),
)  # fmt: skip


@settings(max_examples=150)
@given(PROGRAM, st.integers(0, 1000))
def test_equal_names_mean_equal_bits(program, seed):
    """Of a random program and of each choice that its bits could stand for."""
    inputs = [values(seed + i) for i in range(3)]
    plain = [direct(f"%p{i}") for i in (1, 2, 3)] + ["mov.b32 %d, %a;", "mov.b32 %d, %c;"]
    turned = [TESTS + f"selp.b32 %d, %c, %a, %p{i};" for i in (1, 2, 3)]
    negative = [TESTS + f"not.pred %p4, %p{i}; " + CHOOSE.format("%p4") for i in (1, 2, 3)]
    bits, names, _ = run(program, *inputs)
    for other in (*plain, *turned, *negative):
        other_bits, other_names, _ = run(other, *inputs)
        assert (bits == other_bits)[names == other_names].all()
