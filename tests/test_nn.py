"""Theorem: isobit.nn modules are torch.nn's, by constructor and state dict, and compute isobit's operators."""

import pytest
import torch

import isobit
from isobit import bits
from isobit.ops import dispatch

PAIRS = {
    "Linear": (24, 12),
    "RMSNorm": (24,),
    "LayerNorm": (24,),
    "Embedding": (24, 12, 3),
}


def call(module, samples=None):
    if isinstance(module, torch.nn.Embedding):
        return module(torch.tensor([[1, 3, 23], [0, 3, 1]]), samples)
    return module(torch.linspace(-1, 1, 144).reshape(2, 3, 24), samples)


@pytest.mark.parametrize("name", PAIRS)
def test_state_dicts_and_results_are_those_of_torch(name):
    torch.manual_seed(0)
    ours, stock = getattr(isobit.nn, name)(*PAIRS[name]), getattr(torch.nn, name)(*PAIRS[name])
    assert isinstance(ours, type(stock))
    stock.load_state_dict(ours.state_dict())
    ours.load_state_dict(stock.state_dict())
    y = call(ours)
    if name == "Embedding":
        expected = stock(torch.tensor([[1, 3, 23], [0, 3, 1]]))
    else:
        expected = stock(torch.linspace(-1, 1, 144).reshape(2, 3, 24))
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", PAIRS)
def test_cumulative_lengths_are_samples(name):
    module = getattr(isobit.nn, name)(*PAIRS[name])
    found = []
    for samples in (None, isobit.Samples.packed([3, 3]), torch.tensor([0, 3, 6])):
        module.zero_grad()
        call(module, samples).square().sum().backward()
        found.append([bits.digest(p.grad) for p in module.parameters()])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: isobit.nn.RMSNorm((2, 3)),
        lambda: isobit.nn.RMSNorm(3, elementwise_affine=False),
        lambda: isobit.nn.LayerNorm((2, 3)),
        lambda: isobit.nn.Embedding(3, 4, max_norm=1.0),
        lambda: isobit.nn.Embedding(3, 4, sparse=True),
    ],
)
def test_what_has_no_operator_raises(make):
    with pytest.raises(isobit.ArgumentError):
        make()


@pytest.mark.parametrize(
    "samples",
    [
        torch.tensor([0.0, 3.0]),
        torch.tensor([[0, 3]]),
        torch.tensor([1, 3]),
        torch.tensor([0, 3, 2]),
        [0, 3],
    ],
    ids=["float", "two axes", "not from 0", "decreasing", "a list"],
)
def test_wrong_cumulative_lengths_raise(samples):
    with pytest.raises(isobit.ArgumentError):
        isobit.linear(torch.ones(3, 4), torch.ones(2, 4), samples=samples)


def test_swiglu_is_its_three_layers():
    torch.manual_seed(1)
    block, x = isobit.nn.SwiGLU(16, 48, 8, bias=True), torch.randn(5, 16, requires_grad=True)
    y = block(x)
    by_hand = block.down_proj(isobit.swiglu(block.gate_proj(x), block.up_proj(x)))
    assert bits.equal(y, by_hand)
    with torch.no_grad():
        assert bits.equal(block(x), y)
    y.sum().backward()
    gate, up = isobit.linear_group(
        x.detach().requires_grad_(),
        [block.gate_proj.weight, block.up_proj.weight],
        [block.gate_proj.bias, block.up_proj.bias],
    )
    assert bits.equal(isobit.swiglu(gate, up), isobit.swiglu(block.gate_proj(x), block.up_proj(x)))
    assert x.grad.shape == x.shape


@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
def test_a_frozen_swiglu_has_the_same_bits():
    block, x = isobit.nn.SwiGLU(64, 128), torch.randn(3, 64)
    with torch.no_grad():
        before = block(x)
        with isobit.freeze(block) as frozen:
            assert frozen.nbytes > 0
            assert bits.equal(block(x), before)
