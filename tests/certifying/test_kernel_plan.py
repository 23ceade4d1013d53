"""The compiled kernels compute the plan's expressions: names for all inputs, bits against the oracle."""

import pytest

from isobit.order.plan import ATTENTION_CHUNK
from tests.certifying.attention_cases import (
    attention_case,
    attention_grads_case,
    decode_against_prefill,
)
from tests.certifying.cases import (
    judge,
    linear_case,
    rms_norm_case,
    softmax_case,
    weight_grad_case,
)

TARGETS = ("sm_80", "sm_90", "sm_100")


def check(case, target, instruction=None):
    found = judge(case, target)
    assert found.names > 0
    assert (found.names_differ, found.bits_differ) == (0, 0)
    assert not found.cpu_differ
    if instruction:
        assert found.instruction == instruction


@pytest.mark.parametrize("target", TARGETS)
def test_linear_with_tails_in_every_axis(target):
    check(linear_case("bf16", 5, 20, 100), target, "mma.sync")
    check(linear_case("f32", 5, 20, 50), target)


@pytest.mark.parametrize(("target", "instruction"), [("sm_90", "wgmma"), ("sm_100", "tcgen05")])
def test_large_tiles_of_linear(target, instruction):
    check(linear_case("f16", 70, 40, 512, (64, 32, 64)), target, instruction)


@pytest.mark.parametrize("form", ["counter", "segments"])
def test_four_segments_in_memory(form):
    check(linear_case("bf16", 5, 20, 1024, form=form, out="bf16"), "sm_80")


def test_two_pairs_in_registers():
    check(linear_case("bf16", 5, 20, 2048, form="two pairs", out="bf16"), "sm_80")


def test_rows():
    check(rms_norm_case("bf16", 2, 530, 1), "sm_80")
    check(softmax_case("f32", 2, 530, 1), "sm_90")


@pytest.mark.full
def test_attention_over_a_chunk_boundary():
    check(attention_case("bf16", 2, 150, chunk=128), "sm_80")
    check(attention_case("bf16", 2, 150, chunk=128, form="chunks"), "sm_80")


@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=pytest.mark.full), "bf16"])
def test_attention_of_a_window_and_of_all_keys(dtype):
    check(attention_case(dtype, 2, 150, chunk=64, window=70), "sm_90")
    check(attention_case(dtype, 2, 70, causal=False, depth=48), "sm_90")
    check(attention_case(dtype, 8, 9, causal=False, window=3), "sm_90")
    check(attention_case(dtype, 8, 70, size=66), "sm_90")


@pytest.mark.parametrize("output", ["dq", "dk", "dv"])
def test_attention_gradients(output):
    check(attention_grads_case("bf16", 9, output, group=2, size=4), "sm_90")
    check(attention_grads_case("f32", 9, output, causal=False, window=4), "sm_80")


@pytest.mark.parametrize("parts", [0, 2])
def test_weight_gradient_of_ragged_samples(parts):
    check(weight_grad_case("bf16", [260, 0], 16, 16, parts=parts), "sm_80")


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("form", ["tile", "counter", "segments"])
@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_linear_in_every_form(target, dtype, form, k):
    check(linear_case(dtype, 5, 20, k, form=form), target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("k", [1024, 2048])
def test_linear_with_two_pairs_in_registers(target, dtype, k):
    check(linear_case(dtype, 5, 20, k, form="two pairs"), target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_attention_over_the_chunk_of_the_order(target):
    keys = ATTENTION_CHUNK + 30
    check(attention_case("bf16", 2, keys, group=1), target)
    check(attention_case("bf16", 2, keys, group=1, form="chunks"), target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tile", [16, 64])
def test_attention_tiles_of_decode_and_prefill(target, tile):
    check(attention_case("bf16", 40, 300, chunk=128, tile=tile), target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["fold", "chunks"])
def test_a_decode_tile_is_the_prefill_tile(target, form):
    _, compared, names_differ, bits_differ = decode_against_prefill(target, form)
    assert compared == 5 * 2 * 16
    assert (names_differ, bits_differ) == (0, 0)


@pytest.mark.full
def test_a_decode_tile_with_other_chunks_is_not_the_prefill_tile():
    _, compared, names_differ, bits_differ = decode_against_prefill("sm_80", "chunks", 64)
    assert names_differ == compared
    assert bits_differ > 0


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("output", ["dq", "dk", "dv"])
def test_attention_gradients_over_blocks(target, dtype, output):
    check(attention_grads_case(dtype, 70, output, group=2, window=66), target)
    check(attention_grads_case(dtype, 70, output, tile=64), target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_weight_gradient_of_more_samples(target):
    check(weight_grad_case("bf16", [300, 0, 17, 5], 20, 20), target)
    check(weight_grad_case("f32", [300, 17], 20, 20), target)
