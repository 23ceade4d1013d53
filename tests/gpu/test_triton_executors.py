"""The Triton executors have the bits of the CPU's executors: forward and backward, in every dtype.

1. In the interpreter: odd shapes, NaN, infinities, subnormals, zeros of both signs, ragged samples.
2. Compiled for sm_80, sm_90 and sm_100, run in the PTX machine.
3. Of shares of a batch, of strided inputs, and in another layout of the same batch.
"""

import pytest
import torch

pytest.importorskip("triton")

import isobit
import isobit.certifying
from isobit.ops.attesting import wide_values
from isobit.ops.gpu import executors
from tests.gpu.operator_calls import DTYPES, ODD, SMALL, TARGETS, differences
from tests.sweeps import mostly_full

of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("dtype", mostly_full(DTYPES, DTYPES[:2]), ids=["f32", "bf16", "f16"])
@pytest.mark.sweep(12)
def test_interpreted_bits_are_those_of_the_cpu(name, dtype):
    assert differences(ODD[name](dtype), "interpreter", "sm_90") == []


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.sweep(8)
def test_compiled_bits_are_those_of_the_cpu(name):
    """One dtype and one target; the full run has all."""
    assert differences(SMALL[name](torch.bfloat16), "machine", "sm_90") == []


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SMALL)
@of_dtypes
def test_compiled_bits_on_every_target(name, dtype, target):
    assert differences(SMALL[name](dtype), "machine", target) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ODD)
@of_dtypes
def test_compiled_bits_of_odd_shapes(name, dtype):
    assert differences(ODD[name](dtype), "machine", TARGETS[DTYPES.index(dtype)]) == []


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "experts by routes"])
def test_compiled_kernels_have_no_races_and_no_branches_on_data(name, target):
    assert differences(SMALL[name](torch.bfloat16), "machine", target, check=True) == []


def test_every_executor_is_called():
    names = {name.split(" ")[0] for name in SMALL}
    assert names == {name.split(" ")[0] for name in ODD}
    assert names <= set(executors.OPERATORS)
    assert len(names) == 14


@of_dtypes
def test_gradients_of_a_share_are_not_rounded(dtype):
    generator = torch.Generator().manual_seed(1)
    x, grad = (wide_values((12, 9), dtype, generator) for _ in range(2))
    weight, scales = wide_values((9,), dtype, generator), torch.rand(12, generator=generator)
    spans, ids = torch.tensor([[0, 5], [5, 7]]), torch.arange(12) % 4
    with isobit.certifying.executing("interpreter"):
        isobit.rms_norm(x, weight), isobit.embedding(ids, x)  # registers the executors
        found = [
            torch.ops.isobit.triton_rms_norm_backward(grad, x, weight, scales, spans, False, 8)[1],
            torch.ops.isobit.triton_embedding_weight_grad(grad, ids, spans, 5, -1, 8),
        ]
    expected = [
        torch.ops.isobit.portable_rms_norm_backward(grad, x, weight, scales, spans, False, 8)[1],
        torch.ops.isobit.portable_embedding_weight_grad(grad, ids, spans, 5, -1, 8),
    ]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert isobit.bits.equal(a, b)


def test_strided_inputs_have_the_same_bits():
    generator = torch.Generator().manual_seed(2)
    wide = wide_values((6, 5, 40), torch.bfloat16, generator)
    weight = wide_values((40,), torch.bfloat16, generator)
    calls = {
        "rms_norm": lambda x: isobit.rms_norm(x.transpose(0, 1), weight[::2]),
        "softmax": lambda x: isobit.softmax(x, 0),
        "swiglu": lambda x: isobit.swiglu(x, x.flip(0)),
        "embedding": lambda x: isobit.embedding(torch.arange(5).flip(0), x[:, :, 3].t()),
    }
    for call in calls.values():
        expected = call(wide[:, :, ::2])
        with isobit.certifying.executing("interpreter"):
            assert isobit.bits.equal(call(wide[:, :, ::2]), expected)


def test_a_row_has_the_same_bits_alone():
    x, weight = torch.randn(37, 300), torch.randn(300)
    with isobit.certifying.executing("interpreter"):
        many, one = isobit.rms_norm(x, weight), isobit.rms_norm(x[20:21], weight)
    assert isobit.bits.equal(many[20:21], one)


def test_flushed_subnormals_do_not_reach_the_backends():
    x = torch.full((2, 8), 1e-41)
    expected = isobit.swiglu(x, x + 1)
    torch.set_flush_denormal(True)
    try:
        found = []
        for kind in ("interpreter", "machine"):
            with isobit.certifying.executing(kind):
                found.append(isobit.swiglu(x, torch.ones(2, 8)))
    finally:
        torch.set_flush_denormal(False)
    assert (expected > 0).all()
    for each in found:
        assert isobit.bits.equal(each, expected)


def test_an_unknown_id_is_refused():
    with (
        isobit.certifying.executing("interpreter"),
        pytest.raises(isobit.ArgumentError, match="ids"),
    ):
        isobit.embedding(torch.tensor([5]), torch.ones(5, 2))
