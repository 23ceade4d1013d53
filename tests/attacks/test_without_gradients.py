"""Without gradients a call goes past the formulas in Python, and refuses, computes and records as with them."""

import pytest
import torch
from torch.autograd import forward_ad

import isobit
from isobit import bits

X, WEIGHT, Q = torch.randn(3, 16), torch.randn(5, 16), torch.randn(2, 4, 2, 16)
CALLS = {
    "linear": (lambda x: isobit.linear(x, WEIGHT), X),
    "attention": (lambda q: isobit.attention(q, q, q, is_causal=True), Q),
    "linear_logprob": (
        lambda x: isobit.linear_logprob(x, WEIGHT, torch.zeros(len(x), dtype=torch.long)),
        X,
    ),
    "softmax": (isobit.softmax, X),  # its formula is compiled
}
CASES = pytest.mark.parametrize("name", CALLS)


@CASES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_bits_are_those_with_gradients(name, mode):
    call, x = CALLS[name]
    trained = call(x.clone().requires_grad_())
    with mode():
        alone = call(x)
        assert not alone.requires_grad
    assert bits.equal(alone, trained.detach())
    assert trained.requires_grad


@CASES
@torch.no_grad()
def test_derivatives_without_an_order_are_refused(name):
    call, x = CALLS[name]
    with pytest.raises(isobit.UnsupportedError, match="forward-mode"):
        torch.func.jvp(call, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(isobit.UnsupportedError, match="forward-mode"):
        call(forward_ad.make_dual(x, x))
    with pytest.raises(isobit.UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda x: call(x).sum())(x)
    with pytest.raises(isobit.UnsupportedError, match="vmap"):
        torch.vmap(call)(x[None])


@CASES
def test_an_error_leaves_gradients_as_they_were(name):
    call, x = CALLS[name]
    with torch.no_grad(), pytest.raises(isobit.ArgumentError):
        call(x[..., :3] if name != "softmax" else x.int())
    assert call(x.clone().requires_grad_()).requires_grad


@CASES
@torch.no_grad()
def test_compiled_and_traced_calls_keep_the_operator(name):
    call, x = CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager")
    assert bits.equal(compiled(x), call(x))
    if name == "linear":
        graph = torch.fx.experimental.proxy_tensor.make_fx(call)(x).graph
        assert torch.ops.isobit.linear.default in [node.target for node in graph.nodes]
