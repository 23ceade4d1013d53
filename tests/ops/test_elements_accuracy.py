"""SiLU, GELU and SwiGLU at special values; their exponential is within 1 ulp; fp64 passes gradcheck."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.gelu.op import gelu
from isobit.ops.portable.elementary import logistic
from isobit.ops.silu.op import silu
from isobit.ops.swiglu.op import swiglu
from tests.ops.elements import DTYPES, FUNCTIONS, STOCK, gradient, of_each


def exact(name: str, x: Tensor) -> Tensor:
    """In fp64, by formulas without the cancellation that stock's have."""
    if name == "gelu":
        return x * 0.5 * torch.special.erfc(-x / 2**0.5)
    if name == "gelu by tanh":
        return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return STOCK[name](x)


def ulps(found: Tensor, true: Tensor) -> Tensor:
    """Errors in units of the last place; what is lost below 2^-120, where exponentials become 0, is none."""
    kind = torch.finfo(found.dtype)
    exponent = torch.frexp(true.abs().clamp(min=kind.smallest_normal)).exponent - 1
    error = ((found.double() - true).abs() - 2.0**-120).clamp(min=0)
    return error / torch.ldexp(torch.full_like(true, kind.eps), exponent)


def test_the_exponential_serves_positive_arguments():
    x = torch.linspace(-87.25, 87.25, 2_000_001)
    e, true = logistic(x)[0], (-x).double().exp()
    normal = true >= 2.0**-126
    assert ulps(e, true)[normal].max() <= 1.0


SPECIAL = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 100.0, -100.0, 3e4, -3e4]


@of_each
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_special_values_are_stocks(name, dtype):
    x = torch.tensor(SPECIAL, dtype=dtype)
    if name != "swiglu's up":
        assert FUNCTIONS[name](x[:3]).tolist()[1:2] == [
            torch.inf
        ]  # stock's gelu has a NaN here in some lanes
        assert FUNCTIONS[name](x[:3]).isnan().tolist() == [
            True,
            False,
            True,
        ]  # 0 times infinity, as in stock
    finite = x[3:]
    torch.testing.assert_close(FUNCTIONS[name](finite), STOCK[name](finite))
    torch.testing.assert_close(gradient(FUNCTIONS[name], finite), gradient(STOCK[name], finite))
    huge = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    assert gradient(FUNCTIONS[name], huge).isfinite().all()


def test_gradcheck_in_fp64():
    x, up = (3 * torch.randn(3, 17, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for function in (silu, gelu, lambda t: gelu(t, "tanh")):
        assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradcheck(swiglu, (x, up))
    wide = torch.linspace(-37, 37, 100_001, dtype=torch.float64)
    torch.testing.assert_close(gelu(wide), exact("gelu", wide), rtol=1e-12, atol=0)
    torch.testing.assert_close(silu(wide), F.silu(wide), rtol=2.0**-50, atol=0)
