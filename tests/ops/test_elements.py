"""SiLU, GELU and SwiGLU: native equals portable, bit for bit, forward and backward, for every 16-bit input.

silu-kernel-v1, gelu-kernel-v1 and swiglu-kernel-v1 judge that a value has one result wherever it stands, and the error.
"""

import pytest
import torch
from torch import Tensor

from isobit import bits
from isobit.ops import dispatch
from isobit.ops.attesting import wide_values
from isobit.ops.gelu import portable as portable_gelu
from isobit.ops.silu import portable as portable_silu
from isobit.ops.swiglu import portable as portable_swiglu
from tests.ops.elements import DTYPES, FUNCTIONS, UP, gradient, of_each

needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
PORTABLE = {
    "silu": (portable_silu.silu, portable_silu.silu_backward),
    "gelu": (
        lambda x: portable_gelu.gelu(x, False),
        lambda g, x: portable_gelu.gelu_backward(g, x, False),
    ),
    "gelu by tanh": (
        lambda x: portable_gelu.gelu(x, True),
        lambda g, x: portable_gelu.gelu_backward(g, x, True),
    ),
    "swiglu": (
        lambda x: portable_swiglu.swiglu(x, torch.full_like(x, UP)),
        lambda g, x: portable_swiglu.swiglu_backward(g, x, torch.full_like(x, UP))[0],
    ),
    "swiglu's up": (
        lambda x: portable_swiglu.swiglu(torch.full_like(x, -UP), x),
        lambda g, x: portable_swiglu.swiglu_backward(g, torch.full_like(x, -UP), x)[1],
    ),
}


def every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def many_values(count: int) -> Tensor:
    """Half of them of any bits, half where results are neither 0 nor x."""
    generator = torch.Generator().manual_seed(5)
    any_bits = torch.randint(-(2**31), 2**31, (count // 2,), dtype=torch.int32, generator=generator)
    return torch.cat(
        [any_bits.view(torch.float32), 5 * torch.randn(count - count // 2, generator=generator)]
    )


@needs_native
@of_each
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_equals_portable(name, dtype):
    x = many_values(500_000) if dtype == torch.float32 else every_value(dtype)
    grad = wide_values(tuple(x.shape), dtype, torch.Generator().manual_seed(1))
    forward, backward = PORTABLE[name]
    assert bits.first_difference(FUNCTIONS[name](x), forward(x)) is None
    leaf = x.detach().requires_grad_()
    found = torch.autograd.grad(FUNCTIONS[name](leaf), leaf, grad)[0]
    assert bits.first_difference(found, backward(grad, x)) is None


@needs_native
@of_each
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_far_neighbour_changes_no_bits(name, dtype):
    """Of 64 values near 0 the chain is shorter: [Note: bounded arguments] in csrc/elementary.h."""
    near = torch.linspace(-100, 100, 2001).to(dtype).repeat_interleave(64)
    forward, backward = PORTABLE[name]
    assert bits.first_difference(FUNCTIONS[name](near), forward(near)) is None
    upstream = torch.full_like(near, 1.75)
    leaf = near.requires_grad_()
    whole = torch.autograd.grad(FUNCTIONS[name](leaf), leaf, upstream)[0]
    assert bits.first_difference(whole, backward(upstream, near.detach())) is None
    for far in (torch.nan, torch.inf, -3e38):
        mixed = near.detach().view(-1, 64).clone()
        mixed[:, 5] = far
        mixed.requires_grad_()
        y = FUNCTIONS[name](mixed)
        dx = torch.autograd.grad(y, mixed, upstream.view(-1, 64))[0]
        for found, expected in ((y, FUNCTIONS[name](near)), (dx, whole)):
            others = [t.detach().view(-1, 64)[:, 6:] for t in (found, expected)]
            assert bits.first_difference(*map(torch.clone, others)) is None


@of_each
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gradients_of_16_bit_values_are_the_same_at_every_lane(name, dtype):
    """The contracts judge gradients in fp32 and bf16, and outputs in every dtype."""
    x = every_value(dtype)
    whole = gradient(FUNCTIONS[name], x)
    for k in (1, 5, 8, 15):
        assert bits.equal(gradient(FUNCTIONS[name], x[k:]), whole[k:])
    assert bits.equal(gradient(FUNCTIONS[name], x.view(8, -1).t()), whole.view(8, -1).t())
