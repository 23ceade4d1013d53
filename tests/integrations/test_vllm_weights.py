"""Packed weights of vLLM's layers follow every write, and a packed form that does not is caught."""

import pytest
import torch

import isobit
from isobit.integrations.vllm import weights
from isobit.ops import dispatch
from tests.integrations.test_vllm_parts import wide


def test_writes_to_a_packed_weight_are_seen_and_counted():
    layer = weights.PackedLinear()
    generation = weights.Generation([layer])
    weight, x = (
        torch.nn.Parameter(wide(48, 64, dtype=torch.float32), requires_grad=False),
        torch.randn(3, 64),
    )
    first = layer.compute(x, weight, None)
    assert torch.equal(first, isobit.linear(x, weight))
    before = generation.number
    weight.data.copy_(wide(48, 64, dtype=torch.float32, seed=9))
    written = generation.number
    assert written > before  # before any call reads it
    second = layer.compute(x, weight, None)
    assert not torch.equal(first, second)
    assert torch.equal(second, isobit.linear(x, weight))
    assert generation.number == written
    other = torch.nn.Parameter(weight.data * 2, requires_grad=False)
    assert torch.equal(layer.compute(x, other, None), isobit.linear(x, other))
    replaced = generation.number
    assert replaced > written
    generation.begin_update()
    assert generation.number > replaced
    assert not layer.is_packed
    assert torch.equal(layer.compute(x, other, None), isobit.linear(x, other))


@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
@pytest.mark.parametrize("method", ["compute", "compute_fp32"])
def test_stale_packed_weight_is_caught(monkeypatch, method):
    """A packed form that ignores writes gives other bits than the weight: what follows writes is compared."""
    right, wrong, x = weights.PackedLinear(), weights.PackedLinear(), torch.randn(3, 64)
    weight = torch.nn.Parameter(wide(48, 64, dtype=torch.float32), requires_grad=False)
    weight.untyped_storage()  # as vLLM's loader does; it is no second owner
    more = (None,) if method == "compute" else ()
    for layer in (right, wrong):
        getattr(layer, method)(x, weight, *more)
        assert layer.is_packed
    stale = wrong._packed._snapshot
    weight.data.mul_(1.5)
    monkeypatch.setattr(wrong, "_current", lambda weight: stale)
    watched = torch._lazy_clone(weight.data)  # makes the memory look clean again to the kernel
    expected = isobit.linear(x, weight.clone())
    assert torch.equal(getattr(right, method)(x, weight, *more), expected)
    assert not torch.equal(getattr(wrong, method)(x, weight, *more), expected)
    del watched
