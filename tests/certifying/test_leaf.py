"""The tensor-core leaves return, bit for bit, what mmasim returns for each instruction that Triton emits.

Inputs: ordinary, wide exponents, cancelling, subnormal, near the largest of fp32, and any bits. A leaf with one
constant or one rounding changed must differ on the same inputs.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.leaf import compare
from benchmarks.leaf_cases import INSTRUCTIONS, KINDS, ROWS, draw
from isobit.certifying.names import leaf
from isobit.errors import ArgumentError, UnsupportedError
from isobit.order.engines import TENSOR_CORES, tensor_core

SMALL, MILLION = 20_000, 1_000_000
BY_ENGINE = {(i.engine, i.dtype): i for i in reversed(INSTRUCTIONS)}  # the first of each


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.label)
def test_equals_the_oracle(instruction):
    counts = compare(instruction, SMALL)
    assert counts["outputs"] >= SMALL
    assert counts["subnormal"]
    assert counts["zero"]
    assert counts["nan"]
    assert counts["infinite"] or instruction.dtype == "e4m3"  # which has none
    assert not counts["differ"]


@pytest.mark.full
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.label)
def test_equals_the_oracle_a_million_times(instruction):
    counts = compare(instruction, MILLION, seed=1)
    assert counts["outputs"] >= MILLION
    assert not counts["differ"]


def change(**constants):
    def plant(patch, engine, dtype):
        rule = TENSOR_CORES[engine][dtype]
        new = {name: value(getattr(rule, name)) for name, value in constants.items()}
        patch.setitem(TENSOR_CORES[engine], dtype, replace(rule, **new))

    return plant


def replace_function(name, make):
    def plant(patch, engine, dtype):
        patch.setattr(leaf, name, make(getattr(leaf, name)))

    return plant


def flush(values):
    return np.where(np.abs(values) < 2.0**-126, np.copysign(0.0, values), values)


def no_subnormal_operands(decode):
    def flushed(raw, dtype):
        values, exponents = decode(raw, dtype)
        least = leaf.LEAST_EXPONENT[dtype]
        small = (np.abs(values) < 2.0**least) & (values != 0)
        return np.where(small, 0.0, values), np.where(small, np.int16(leaf.NO_EXPONENT), exponents)

    return flushed


def normalised(decode):
    """Give a subnormal operand the exponent of its own leading bit."""

    def found(raw, dtype):
        values, exponents = decode(raw, dtype)
        with np.errstate(invalid="ignore"):
            own = np.where(np.isfinite(values), np.frexp(values)[1] - 1, exponents)
        return values, np.where(values == 0, exponents, own).astype(np.int16)

    return found


NVIDIA = ("tc24x8", "tc25x16")
PLANTED = {
    "one fractional bit more": (change(fraction=lambda f: f + 1), (*NVIDIA, "cdna3")),
    "one fractional bit fewer": (change(fraction=lambda f: f - 1), (*NVIDIA, "cdna3")),
    "half the products a step": (change(products=lambda n: n // 2), (*NVIDIA, "cdna3")),
    "twice the products a step": (change(products=lambda n: 2 * n), ("tc24x8", "cdna3")),
    "the exponent of a zero": (change(zero=lambda e: e + 9), NVIDIA),
    "the accumulator late": (change(late_accumulator=lambda _: True), NVIDIA),
    "the accumulator early": (change(late_accumulator=lambda _: False), ("cdna3",)),
    "the result to nearest": (
        replace_function("step", lambda step: lambda rule, *rest: nearest_step(step, rule, *rest)),
        NVIDIA,
    ),
    "subnormal operands flushed": (
        replace_function("decode", no_subnormal_operands),
        (*NVIDIA, "cdna3"),
    ),
    "subnormal operands normalised": (replace_function("decode", normalised), (*NVIDIA, "cdna3")),
    "subnormal results flushed": (
        replace_function("narrow", lambda narrow: lambda values: narrow(flush(values))),
        (*NVIDIA, "cdna3"),
    ),
    "subnormal accumulators flushed": (
        replace_function("widen", lambda widen: lambda c: flush(widen(c))),
        (*NVIDIA, "cdna3"),
    ),
}


def nearest_step(step, rule, products, exponents, total):
    """Round an NVIDIA step to nearest: the bits that the step would cut are kept, then rounded."""
    if rule.late_accumulator:
        return step(rule, products, exponents, total)
    return leaf.nearest(step(replace(rule, result=50), products, exponents, total))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32"])
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine) for name, (_, engines) in PLANTED.items() for engine in engines],
)
@pytest.mark.sweep(30)
def test_a_planted_wrong_leaf_is_caught(name, engine, dtype, monkeypatch):
    if (name, dtype) == ("the exponent of a zero", "f16"):
        return  # products of f16 are all far above it
    PLANTED[name][0](monkeypatch, engine, dtype)
    assert compare(BY_ENGINE[engine, dtype], SMALL)["differ"]  # 0 without the plant, see above


@pytest.mark.parametrize(("engine", "dtype"), BY_ENGINE, ids=map("-".join, BY_ENGINE))
def test_arrays_give_what_the_definition_gives(engine, dtype):
    generator, add = np.random.default_rng(3), tensor_core(engine, dtype)
    values, ignored = leaf.tables(dtype)[0], leaf.FORMATS[dtype][2]
    instruction, k = BY_ENGINE[engine, dtype], 2 * TENSOR_CORES[engine][dtype].products + 3
    for kind in KINDS:
        a, b, c = draw(instruction, k, kind, 1, generator)
        found = leaf.multiply_accumulate(a, b, c, engine, dtype)
        for i, j in np.ndindex(ROWS, ROWS):
            left, right = values[a[0, i] >> ignored].tolist(), values[b[0, j] >> ignored].tolist()
            want = add(float(c[0, i, j]), list(zip(left, right, strict=True)))
            assert bits_of(want) == found.view(np.uint32)[0, i, j], (kind, i, j)


def bits_of(value):
    return leaf.NAN if math.isnan(value) else int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize("engine", [*NVIDIA, "cdna3"])
def test_a_thread_that_flushes_subnormals_gets_the_same_bits(engine):
    a, b, c = draw(BY_ENGINE[engine, "bf16"], 32, "subnormal", 8, np.random.default_rng(5))
    want = leaf.multiply_accumulate(a, b, c, engine, "bf16").view(np.uint32)
    assert ((want & 0x7F800000 == 0) & (want << 1 != 0)).any()
    if not torch.set_flush_denormal(True):
        return  # a processor without that switch
    try:
        found = leaf.multiply_accumulate(a, b, c, engine, "bf16").view(np.uint32)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(found, want)


def test_a_tile_is_the_same_whatever_tile_it_is_part_of():
    a, b, c = draw(BY_ENGINE["tc25x16", "bf16"], 64, "wide", 20, np.random.default_rng(7))
    tall = a.reshape(1, -1, 64)
    whole = leaf.multiply_accumulate(tall, b[:1], np.tile(c[0], (20, 1))[None], "tc25x16", "bf16")
    for i in range(20):
        part = leaf.multiply_accumulate(a[i], b[0], c[0], "tc25x16", "bf16")
        assert part.tobytes() == whole[0, i * ROWS : (i + 1) * ROWS].tobytes()


def test_the_order_inside_a_step_is_free_and_that_of_steps_is_not():
    a, b, c = draw(BY_ENGINE["tc24x8", "bf16"], 16, "wide", 4, np.random.default_rng(9))
    once = leaf.multiply_accumulate(a, b, c, "tc24x8", "bf16").tobytes()

    def swapped(*order):
        at = list(order)
        return leaf.multiply_accumulate(a[..., at], b[..., at], c, "tc24x8", "bf16").tobytes()

    assert swapped(7, 6, 5, 4, 3, 2, 1, 0, *range(8, 16)) == once
    assert swapped(*range(8, 16), *range(8)) != once


def test_what_is_not_known_is_refused():
    a = np.zeros((16, 16), np.uint16)
    c = np.zeros((16, 16), np.float32)
    for engine, dtype in (
        ("tc25x16", "e4m3"),
        ("tc13x32", "bf16"),
        ("cdna4", "bf16"),
        ("cdna3", "e5m2"),
    ):
        with pytest.raises(UnsupportedError, match="known arithmetic"):
            leaf.multiply_accumulate(a, a, c, engine, dtype)
    with pytest.raises(UnsupportedError, match="uint32"):
        leaf.multiply_accumulate(a, a, c, "tc25x16", "tf32")
    with pytest.raises(ArgumentError, match="float32"):
        leaf.multiply_accumulate(a, a, c.astype(np.float64), "tc25x16", "bf16")
    with pytest.raises(ArgumentError, match="K last"):
        leaf.multiply_accumulate(a, a[:, :8], c, "tc25x16", "bf16")
    for target, dtype in (
        ("gfx950", "bf16"),
        ("gfx942", "e4m3"),
        ("sm_80", "e4m3"),
        ("sm_70", "f16"),
    ):
        with pytest.raises(UnsupportedError, match="whose arithmetic"):
            leaf.engine_of(target, dtype)
    with pytest.raises(UnsupportedError, match="known arithmetic"):
        leaf.engine_of("sm_90", "e3m2")


def test_each_instruction_has_the_engine_of_its_target():
    for instruction in INSTRUCTIONS:
        assert leaf.engine_of(instruction.target, instruction.dtype) == instruction.engine
