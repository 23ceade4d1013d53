"""The evaluator's arithmetic equals IEEE fp32, and its engines differ where they should."""

import math
import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.order.addition import digest
from isobit.order.engines import TENSOR_CORES
from isobit.order.evaluate import (
    ENGINES,
    add_fp32,
    amx_engine,
    chain_engine,
    evaluate,
    expected_tree,
    feature_segments,
    fma_fp32,
)
from isobit.reveal.certificate import PlainSum
from isobit.reveal.tree import reveal

FP32 = st.floats(width=32, allow_nan=False)


def bits(value):
    return struct.pack("<f", value)


@given(FP32, FP32)
def test_addition_is_torch_addition(a, b):
    want = (torch.tensor(a, dtype=torch.float32) + torch.tensor(b, dtype=torch.float32)).item()
    got = add_fp32(a, b)
    assert bits(got) == bits(want) or (math.isnan(got) and math.isnan(want))


@given(FP32, FP32)
def test_fused_multiply_add_with_zero_or_one_is_plain(a, b):
    product = (torch.tensor(a, dtype=torch.float32) * torch.tensor(b, dtype=torch.float32)).item()
    got = fma_fp32(a, b, 0.0)
    assert got == product or (math.isnan(got) and math.isnan(product))
    got = fma_fp32(a, 1.0, b)
    assert bits(got) == bits(add_fp32(a, b)) or math.isnan(got)


def test_a_fused_multiply_add_rounds_once():
    a = 1.0 + 2.0**-12
    assert fma_fp32(a, a, -1.0) == 2.0**-11 + 2.0**-24
    assert struct.unpack("<f", bits(a * a))[0] - 1.0 != 2.0**-11 + 2.0**-24


def test_engines_differ():
    factors = [(1.0, 1.0)] + [(2.0**-24, 1.0)] * 63
    assert chain_engine(None, factors) == 1.0
    assert amx_engine(None, factors) > 1.0
    assert chain_engine(1.0, [(2.0**-24, 1.0)] * 2) == 1.0 + 2.0**-23
    assert amx_engine(1.0, [(2.0**-24, 1.0)] * 2) == 1.0 + 2.0**-23
    assert (
        amx_engine(1.0, ([(2.0**-24, 1.0)] + [(0.0, 0.0)] * 31) * 2) == 1.0
    )  # it continues from 1.0
    tiny = [(2.0**-70, 2.0**-70)]
    assert chain_engine(None, tiny) == 2.0**-140
    assert amx_engine(None, tiny) == 0.0


def test_expected_tree_is_what_probing_the_evaluator_shows():
    for engine in ENGINES:
        for extent in (1, 5, 33, 96, 300)[: 4 if engine in TENSOR_CORES else 5]:
            segments = feature_segments(extent, engine)

            def total(values, segments=segments, engine=engine):
                return evaluate(segments, [(value, 1.0) for value in values], ENGINES[engine])

            # Probing knows the arithmetic of CPUs; of a tensor core it reads the order alone.
            tree = reveal(
                PlainSum("evaluator", extent, total), arithmetic=engine not in TENSOR_CORES
            )
            assert tree.order_digest == digest(expected_tree(segments, engine))
