"""SiLU, GELU and SwiGLU are functions of one element: a value has one result wherever it stands.

1. All 16-bit inputs, and ten million fp32 ones, have the same bits at every lane, stride and tail, forward and
   backward; stock, and kernels planted with another tail, do not.
2. Native equals portable, bit for bit.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import bits
from isobit.ops import dispatch
from isobit.ops.gelu import portable as portable_gelu
from isobit.ops.portable.hard_inputs import wide_values
from isobit.ops.silu import portable as portable_silu
from isobit.ops.silu.op import silu
from isobit.ops.swiglu import portable as portable_swiglu
from isobit.ops.swiglu.op import swiglu
from tests.ops.elements import DTYPES, FUNCTIONS, STOCK, UP, gradient, of_each

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


def backward_of(function):
    return lambda x: gradient(function, x)


# ---- 1. where a value stands -----------------------------------------------------------------------------


def at_every_lane(function, x: Tensor) -> bool:
    """Whole, and from each of sixteen offsets: every value is seen in every lane and some in the tail."""
    whole = function(x)
    return all(bits.equal(function(x[k:]), whole[k:]) for k in range(1, 17))


def in_pieces(function, x: Tensor) -> bool:
    """Rows of seven with a gap after each, which are tails only; then each row by itself, for some."""
    whole, n = function(x), len(x) // 7 * 7
    room = torch.zeros(n // 7, 9, dtype=x.dtype)
    room[:, 1:8] = x[:n].view(-1, 7)
    if not bits.equal(function(room[:, 1:8]).reshape(-1), whole[:n]):
        return False
    return all(
        bits.equal(function(x[k : k + 7]), whole[k : k + 7])
        for k in range(0, n, n // 100 // 7 * 7 or 7)
    )


def strided(function, x: Tensor) -> bool:
    """Three apart, and column by column."""
    whole, wide = function(x), torch.zeros(len(x), 3, dtype=x.dtype)
    wide[:, 1] = x
    n = len(x) // 8 * 8
    columns = x[:n].view(8, -1).t()
    return bits.equal(function(wide[:, 1]), whole) and bits.equal(
        function(columns), whole[:n].view(8, -1).t()
    )


PLACES = (at_every_lane, in_pieces, strided)


@of_each
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_16_bit_value_has_one_result(name, dtype):
    x = every_value(dtype)
    for function in (FUNCTIONS[name], backward_of(FUNCTIONS[name])):
        assert [place.__name__ for place in PLACES if not place(function, x)] == []


@of_each
def test_ten_million_values_have_one_result(name):
    x = many_values(
        10_000_000 if name != "swiglu's up" else 1_000_000
    )  # a product, and no function of x
    assert in_pieces(FUNCTIONS[name], x)
    assert strided(FUNCTIONS[name], x)
    assert at_every_lane(FUNCTIONS[name], x[-100_003:])
    few = x[::19].contiguous()
    assert all(place(backward_of(FUNCTIONS[name]), few) for place in (in_pieces, strided))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu by tanh"])
def test_the_control_stock_depends_on_where_a_value_stands(name):
    """Else the checks above would show nothing."""
    x = many_values(100_000)
    assert [place.__name__ for place in PLACES if not place(STOCK[name], x)] != []


def tail_by_libm(x: Tensor) -> Tensor:
    """The last few, which do not fill sixteen lanes, by other code; of rows, each row's."""
    y, n = silu(x), x.shape[-1]
    if not x.is_contiguous() or n % 16:
        y[..., n // 16 * 16 :] = x[..., n // 16 * 16 :] * torch.sigmoid(x[..., n // 16 * 16 :])
    return y


PLANTED = {
    "a tail by libm": tail_by_libm,
    "small batches by stock": lambda x: F.silu(x) if x.numel() < 100 else silu(x),
    "strided input by stock": lambda x: silu(x) if x.is_contiguous() else F.silu(x),
    "first element rounded to bf16": lambda x: torch.cat(
        [silu(x[:1]).bfloat16().float(), silu(x[1:])]
    ),
    "unaligned memory by stock": lambda x: silu(x) if x.storage_offset() % 16 == 0 else F.silu(x),
}


@pytest.mark.parametrize("wrong", PLANTED)
def test_planted_kernels_are_caught(wrong):
    x = many_values(100_000)
    assert not all(place(PLANTED[wrong], x) for place in PLACES)
    assert all(place(silu, x) for place in PLACES)


@of_each
def test_threads_change_nothing(name):
    x, before, found = many_values(200_000), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(torch.cat([FUNCTIONS[name](x), gradient(FUNCTIONS[name], x)]))
    finally:
        torch.set_num_threads(before)
    assert all(bits.equal(f, found[0]) for f in found)


# ---- 2. one executor's bits are the other's --------------------------------------------------------------


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


def test_swiglu_rounds_once_and_no_sooner():
    """A bf16 silu between would show."""
    gate, up = (
        wide_values((64, 100), torch.bfloat16, torch.Generator().manual_seed(s)) for s in (1, 2)
    )
    assert bits.equal(swiglu(gate, up), swiglu(gate.float(), up.float()).bfloat16())
    assert not bits.equal(swiglu(gate, up), silu(gate) * up)


def test_rows_of_one_product_need_no_copy_to_be_equal():
    """gate and up as halves of one tensor, as a fused linear gives them."""
    both = torch.randn(5, 2 * 70)
    gate, up = both.chunk(2, -1)
    assert bits.equal(swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous()))
