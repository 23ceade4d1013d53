"""Every float opcode of the machine has the bits that numpy, or exact arithmetic, gives."""

import math
from fractions import Fraction

import numpy as np
import pytest

from isobit.certifying.names import arithmetic as ar
from isobit.certifying.names import names as nm
from isobit.certifying.running.refusals import OpcodeError
from tests.certifying.snippets import names_of, run, values

A, B, C = (values(seed) for seed in range(3))
B[A == 0] = 1.0  # zeros of different signs have a test of their own


def same(bits, expected):
    """Equal bits, a NaN being the canonical one."""
    wanted = np.asarray(expected, np.float32)
    wanted_bits = np.where(np.isnan(wanted), np.uint32(0x7FFFFFFF), wanted.view(np.uint32))
    np.testing.assert_array_equal(bits, wanted_bits)


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("add.rn.f32 %d, %a, %b;", lambda: A + B),
        ("sub.rn.f32 %d, %a, %b;", lambda: A - B),
        ("mul.rn.f32 %d, %a, %b;", lambda: A * B),
        ("div.rn.f32 %d, %a, %b;", lambda: A / B),
        ("sqrt.rn.f32 %d, %a;", lambda: np.sqrt(A)),
        ("rcp.rn.f32 %d, %a;", lambda: np.float32(1) / A),
        ("neg.f32 %d, %a;", lambda: -A),
        ("cvt.rmi.f32.f32 %d, %a;", lambda: np.floor(A)),
        ("cvt.rpi.ftz.f32.f32 %d, %a;", lambda: np.ceil(ar.flush(A))),
        ("abs.f32 %d, %a;", lambda: np.abs(A)),
        ("max.f32 %d, %a, %b;", lambda: np.fmax(A, B)),
        ("min.f32 %d, %a, %b;", lambda: np.fmin(A, B)),
        ("max.NaN.f32 %d, %a, %b;", lambda: np.maximum(A, B)),
        ("add.rn.ftz.f32 %d, %a, %b;", lambda: ar.flush(ar.flush(A) + ar.flush(B))),
        ("mov.b32 %r1, 0f40490FDB; mul.rn.f32 %d, %a, %r1;", lambda: A * np.float32(np.pi)),
    ],
)
def test_fp32(opcode, expected):
    with np.errstate(all="ignore"):
        same(run(opcode, A, B, C)[0], expected())


def test_signed_zeros_of_max_and_min():
    zero = np.array([0.0, -0.0] * 16, np.float32)
    other = -zero
    assert not run("max.f32 %d, %a, %b;", zero, other)[0].any()
    assert (run("min.f32 %d, %a, %b;", zero, other)[0] == 0x80000000).all()


def exact_fma(x, y, z):
    """The fused multiply-add of finite fp32 values by exact fractions."""
    total = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    if total == 0:
        return float(np.float64(x) * np.float64(y) + np.float64(z))
    power = max(math.floor(math.log2(abs(total))) - 23, -149)
    while abs(total) / Fraction(2) ** power >= 2**24:
        power += 1
    scaled = total / Fraction(2) ** power
    return float(round(scaled) * Fraction(2) ** power)


def test_fma_rounds_once():
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal(512).astype(np.float32) for _ in range(2))
    near = -(x * y)  # cancels, so that a product that was rounded first would show
    z = np.where(rng.random(512) < 0.5, near, rng.standard_normal(512)).astype(np.float32)
    bits = run("fma.rn.f32 %d, %a, %b, %c;", x, y, z, threads=512)[0]
    same(bits, [exact_fma(*each) for each in zip(x, y, z, strict=True)])
    assert (bits.view(np.float32) != x * y + z).any()


@pytest.mark.parametrize("stem", ["add", "sub", "mul"])
def test_pairs_of_fp32_are_two_operations(stem):
    wide = [np.stack([x, y], 1).reshape(-1).view(np.uint64) for x, y in ((A, B), (C, A))]
    bits = run(f"{stem}.rn.f32x2 %d, %a, %b;", *wide, out=64)[0].view(np.uint32)
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[stem]
    with np.errstate(all="ignore"):
        same(bits, np.stack([operation(A, C), operation(B, A)], 1).reshape(-1))


def test_names_of_pairs_are_names_of_parts():
    split = "mov.b64 {%r1, %r2}, %a; mov.b64 {%r3, %r4}, %b; add.rn.f32 %d, %r2, %r4;"
    packed = "add.rn.f32x2 %w1, %a, %b; mov.b64 {%r1, %d}, %w1;"
    arrays = [np.arange(32, dtype=np.uint64) for _ in range(2)]
    assert (run(split, *arrays)[1] == run(packed, *arrays)[1]).all()


def nearest(exact, kind):
    """The 16-bit pattern nearest to exact fp64 values, ties to even, found among all patterns."""
    patterns = np.arange(1 << 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        all_values = ar.widen(patterns, kind).astype(np.float64)
    finite = np.isfinite(all_values) & ~((all_values == 0) & np.signbit(all_values))
    order = np.argsort(all_values[finite], kind="stable")
    patterns, all_values = patterns[finite][order], all_values[finite][order]
    above = np.clip(np.searchsorted(all_values, exact), 1, all_values.size - 1)
    low, high = all_values[above - 1], all_values[above]
    up = (high - exact < exact - low) | ((high - exact == exact - low) & (patterns[above] % 2 == 0))
    return np.where(up, patterns[above], patterns[above - 1])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("stem", ["add", "sub", "mul", "fma", "max"])
def test_16_bits(kind, stem):
    rng = np.random.default_rng(1)
    sizes = rng.standard_normal((3, 512)) * 2.0 ** rng.integers(-6, 6, (3, 512))
    raw = [nearest(each, kind) for each in sizes]
    operands = "%a, %b, %c" if stem == "fma" else "%a, %b"
    rounding = "" if stem == "max" else ".rn"
    body = f"{stem}{rounding}.{kind} %d, {operands};"
    bits, names, _ = run(body, *raw, out=16, threads=512)
    x, y, z = (ar.widen(each, kind).astype(np.float64) for each in raw)
    exact = {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z, "max": np.maximum(x, y)}
    wanted = nearest(exact[stem], kind)  # every result is exact in fp64 at these sizes
    zero = exact[stem] == 0
    np.testing.assert_array_equal(bits[~zero], wanted[~zero])
    assert not nm.is_constant(names).any()


def test_conversions():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(A.copy())
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        bits = run(f"cvt.rn.{kind}.f32 %d, %a;", A, out=16)[0]
        wanted = x.to(dtype).view(torch.int16).numpy().view(np.uint16)
        wanted = ar.canonical(wanted, kind)
        np.testing.assert_array_equal(bits, wanted)
        back = run(f"cvt.f32.{kind} %d, %a;", bits)[0]
        wide = ar.widen(bits, kind).view(np.uint32)  # a bf16 is its upper half, also of a NaN
        np.testing.assert_array_equal(back, wide if kind == "bf16" else ar.canonical(wide))
    pair = run("cvt.rn.bf16x2.f32 %d, %a, %b;", A, B)[0]
    upper = run("cvt.rn.bf16.f32 %d, %a;", A, out=16)[0]
    lower = run("cvt.rn.bf16.f32 %d, %a;", B, out=16)[0]
    np.testing.assert_array_equal(pair, upper.astype(np.uint32) << 16 | lower)


@pytest.mark.parametrize(
    ("mode", "function"), [("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_float_to_integer_clamps(mode, function):
    bits = run(f"cvt.{mode}.s32.f32 %d, %a;", A)[0].view(np.int32)
    whole = np.nan_to_num(function(A.astype(np.float64)), nan=0.0, posinf=2e9**2, neginf=-(2e9**2))
    wanted = np.clip(whole, -(2**31), 2**31 - 1).astype(np.int64)
    np.testing.assert_array_equal(bits, wanted)


def test_approximations_are_flagged_and_never_constants():
    body = "mov.b32 %r1, 0f40000000; ex2.approx.f32 %d, %r1;"
    bits, names, machine = run(body, A)
    assert (bits.view(np.float32) == 4.0).all()
    assert machine.approximate == {"ex2.approx.f32"}
    assert not nm.is_constant(names).any()
    names = [names_of(f"{stem}.approx.f32 %d, %a;")[0] for stem in ("ex2", "lg2", "rcp", "tanh")]
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    "opcode",
    ["add.rz.f32 %d, %a, %b;", "add.rn.sat.f32 %d, %a, %b;", "max.xorsign.abs.f32 %d, %a, %b;"],
)
def test_modifiers_that_are_not_known_are_refused(opcode):
    with pytest.raises(OpcodeError, match="PTX line"):
        run(opcode, A, B)


def test_arithmetic_that_ptxas_may_fuse_is_a_fact():
    machine = run("mul.f32 %r1, %a, %b; add.f32 %d, %r1, %c;", A, B, C)[2]
    assert any("fuse" in each for each in machine.facts)
    assert not run("mul.rn.f32 %d, %a, %b;", A, B)[2].facts
