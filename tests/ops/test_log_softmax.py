"""Log-softmax has one order: a row's bits depend on that row alone, and are those of the portable executor.

1. Native equals portable, bit for bit, for every kind of extent, dtype and special value, forward and backward.
2. The logarithm has its limits at the edges; fp64 passes gradcheck.

log-softmax-kernel-v1 judges the order, the invariances, the logarithm and the error.
"""

import math

import pytest
import torch
from torch import Tensor

from isobit import ArgumentError, UnsupportedError, bits
from isobit.ops import dispatch
from isobit.ops.attesting import wide_values
from isobit.ops.log_softmax import portable
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.portable.elementary import log_positive

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXTENTS = [1, 2, 15, 16, 17, 256, 300, 511, 512, 1024, 1025, 1101, 2049, 5000]
needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


def hard_rows(rows: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some rows of logits, some of wide values, some whose largest element moves from leaf to leaf."""
    generator = torch.Generator().manual_seed(n)
    x = 10 * torch.randn(rows, n, generator=generator)
    x[1::3] = wide_values((len(x[1::3]), n), torch.float32, generator)
    x[2::3] = torch.linspace(-60, 60, n) + torch.randn(len(x[2::3]), n, generator=generator)
    return x.to(dtype)


def gradient(function, x: Tensor, grad: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(function(leaf, -1), leaf, grad)[0]


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", EXTENTS)
def test_native_is_portable(n, dtype):
    x, grad = (
        hard_rows(6, n, dtype),
        wide_values((6, n), dtype, torch.Generator().manual_seed(n + 1)),
    )
    y = log_softmax(x)
    assert bits.first_difference(y, portable.log_softmax(x)) is None
    assert (
        bits.first_difference(
            gradient(log_softmax, x, grad), portable.log_softmax_backward(grad, y)
        )
        is None
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("n", [3, 16, 40, 600, 1101])
def test_rows_without_an_answer_spoil_no_other(n, dtype):
    x = torch.randn(6, n).to(dtype)
    x[0, n - 1], x[1, 0], x[2] = torch.nan, torch.inf, -torch.inf
    x[3, 1:] = -torch.inf
    y = log_softmax(x)
    assert bits.equal(y[:3], torch.full_like(y[:3], torch.nan))
    assert y[3].tolist() == [0.0] + [-torch.inf] * (n - 1)
    assert not y[4:].isnan().any()
    assert bits.equal(y, portable.log_softmax(x))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4), (1,), (4, 1), (2, 3, 4, 5)])
def test_shapes_and_axes_are_stocks_in_fp64(shape, dtype):
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
        .to(dtype)
        .requires_grad_()
    )
    grad = torch.randn(shape).to(dtype)
    wide = x.detach().double().requires_grad_()
    eps = torch.finfo(dtype).eps
    for dim in range(-len(shape), len(shape)):
        y, stock = log_softmax(x, dim), torch.log_softmax(wide, dim)
        assert y.dtype == dtype
        torch.testing.assert_close(
            y.double(), stock, rtol=eps, atol=2 * eps if dtype == torch.float32 else 1e-6
        )
        ours, theirs = (
            torch.autograd.grad(y, x, grad)[0],
            torch.autograd.grad(stock, wide, grad.double())[0],
        )
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=16 * eps)


def test_the_edges_of_the_logarithm():
    edges = torch.tensor([1.0, torch.inf, torch.nan, 2.0**-126])
    assert log_positive(edges)[:2].tolist() == [0.0, torch.inf]
    assert log_positive(edges)[2].isnan()
    assert log_positive(edges)[3].item() == pytest.approx(-126 * math.log(2), rel=1e-7)


def test_fp64_takes_torchs_logarithm():
    x = torch.rand(100, dtype=torch.float64) + 1
    assert torch.equal(log_positive(x), x.log())


def test_gradcheck_in_fp64():
    x = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_softmax, (x,))
    assert torch.autograd.gradcheck(lambda t: log_softmax(t, 0), (x,))


@needs_native
def test_opcheck():
    log_softmax(torch.zeros(1, 1))
    x = torch.randn(2, 5, 70, requires_grad=True)
    for prefix in ("log_softmax", "portable_log_softmax"):
        torch.library.opcheck(getattr(torch.ops.isobit, prefix), (x,))


def test_second_order_is_refused():
    x = torch.randn(3, 8, requires_grad=True)
    (first,) = torch.autograd.grad(log_softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="first-order"):
        first.sum().backward()


REFUSED = {
    "dtype": lambda x: log_softmax(x.int()),
    "list": lambda x: log_softmax(x.tolist()),
    "sparse": lambda x: log_softmax(x.to_sparse()),
    "scalar": lambda x: log_softmax(x[0, 0]),
    "no such axis": lambda x: log_softmax(x, 2),
    "no axis": lambda x: log_softmax(x, None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_have_a_remedy(case):
    with pytest.raises(
        ArgumentError, match=r"(?s)isobit\.\w+: expected .*\n  received: .*\n  remedy: "
    ):
        REFUSED[case](torch.randn(4, 8))
