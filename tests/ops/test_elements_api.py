"""SiLU, GELU and SwiGLU in torch's world: shapes, opcheck, compile; what has no kernel is refused in words."""

import pytest
import torch
from torch import Tensor

from isobit import ArgumentError, UnsupportedError, bits
from isobit.foundation import launches
from isobit.ops import dispatch
from isobit.ops.gelu.op import gelu
from isobit.ops.rotary.op import rotary
from isobit.ops.silu.op import silu
from isobit.ops.swiglu.op import swiglu
from tests.ops.elements import FUNCTIONS, STOCK, gradient, of_each

needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


@of_each
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4, 5)])
def test_shapes_are_stocks(name, shape):
    x = torch.randn(shape)
    torch.testing.assert_close(FUNCTIONS[name](x), STOCK[name](x))
    assert gradient(FUNCTIONS[name], x).shape == x.shape
    assert FUNCTIONS[name](x).is_contiguous()


@needs_native
@pytest.mark.parametrize("prefix", ["", "portable_"])
def test_opcheck(prefix):
    x = torch.randn(3, 21, requires_grad=True)
    silu(x), gelu(x), swiglu(x, x)
    ops, tests = torch.ops.isobit, ("test_schema", "test_faketensor")
    for name, given in (("silu", (x,)), ("gelu", (x, True)), ("swiglu", (x, x.detach().clone()))):
        torch.library.opcheck(getattr(ops, prefix + name), given)
        known = (x.detach(), *(t.detach() if isinstance(t, Tensor) else t for t in given))
        torch.library.opcheck(getattr(ops, f"{prefix}{name}_backward"), known, test_utils=tests)


@needs_native
def test_launches_are_told_with_their_sizes():
    x = torch.randn(2, 3, 8)
    with launches.record_launches() as seen:
        silu(x), gelu(x.bfloat16()), swiglu(x[0, 0], x[0, 1]), rotary(x, x[:, 0], x[:, 1])
        silu(x.double()), silu(x[0, 0, 0])
    assert [(launch.operator, launch.executor, launch.sizes) for launch in seen] == [
        ("silu", "native", (6, 8)),
        ("gelu", "native", (6, 8)),
        ("swiglu", "native", (1, 8)),
        ("rotary", "native", (2, 3, 8)),
        ("silu", "portable", (6, 8)),
        ("silu", "native", (1, 1)),
    ]


@of_each
def test_compiles_whole_with_the_same_bits(name):
    x = torch.randn(3, 5, 21, requires_grad=True)
    function = FUNCTIONS[name]
    compiled = torch.compile(
        lambda t: function(t).square().sum(), fullgraph=True, backend="aot_eager"
    )
    plain = torch.autograd.grad(function(x).square().sum(), x)[0]
    assert bits.equal(plain, torch.autograd.grad(compiled(x), x)[0])


@of_each
def test_vmap_and_second_order_are_refused(name):
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.func.vmap(FUNCTIONS[name])(x.detach())
    (first,) = torch.autograd.grad(FUNCTIONS[name](x).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="first-order"):
        first.sum().backward()


REFUSED = {
    "dtype": lambda x: silu(x.int()),
    "list": lambda x: gelu(x.tolist()),
    "sparse": lambda x: swiglu(x, x.to_sparse()),
    "an approximation without a name": lambda x: gelu(x, "sigmoid"),
    "shapes": lambda x: swiglu(x, x[:1]),
    "dtypes": lambda x: swiglu(x, x.double()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_expected_received_and_remedy(case):
    with pytest.raises(
        ArgumentError, match=r"(?s)isobit\.\w+: expected .*\n  received: .*\n  remedy: "
    ):
        REFUSED[case](torch.randn(4, 8))


@needs_native
def test_direct_calls_are_guarded():
    x = torch.randn(2, 8)
    for wrong in (x[:1], x.bfloat16(), x[0, 0]):
        with pytest.raises(RuntimeError, match="remedy"):
            torch.ops.isobit.swiglu_backward(x, x, wrong)
    torch.ops.isobit.attest(False)
    try:
        for call in (torch.ops.isobit.silu, lambda t: torch.ops.isobit.gelu(t, True)):
            with pytest.raises(RuntimeError, match="attested"):
                call(x)
    finally:
        torch.ops.isobit.attest(True)
