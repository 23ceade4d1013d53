"""The exact sum has no order: its bits are those of the true sum rounded once, whatever moves.

1. Both executors hold the same digits, and round as fractions do: subnormals, ties, cancellation, infinities, NaN.
2. Dtypes mix; flushed denormals do not reach the kernels. exact-sum-kernel-v1 judges that nothing else matters.
3. Gradients are the upstream gradient, everywhere.
"""

import math
from fractions import Fraction

import pytest
import torch

from isobit import ArgumentError, bits
from isobit.ops import dispatch
from isobit.ops.exact_sum import portable
from isobit.ops.exact_sum.op import exact_state, exact_sum, round_state
from isobit.order.exact_sum import exact_sum as defined_fp64
from isobit.order.exact_sum import exact_sum_fp32 as defined_fp32
from tests.sweeps import mostly_full

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 2, 15, 16, 17, 2047, 2048, 2049, 5000, 70_001]
needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


def wide(size: int, dtype: torch.dtype, lowest: int = -149, highest: int = 126) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    shift = torch.randint(lowest, highest, (size,), generator=generator)
    x = torch.ldexp(torch.randn(size, generator=generator), shift).to(dtype)
    return torch.where(x.isfinite(), x, -1.0)


def true_sum(x: torch.Tensor, squared: bool) -> Fraction:
    return sum((Fraction(v) ** (2 if squared else 1) for v in x.double().tolist()), Fraction(0))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", mostly_full(SIZES, SIZES[:-1]))
@pytest.mark.sweep(10)
def test_digits_are_the_true_sums(size, dtype):
    for x in (
        wide(size, dtype),
        wide(size, dtype, -3, 3),
        torch.cat([wide(size, dtype), -wide(size, dtype)]),
    ):
        for squared in (False, True):
            state = exact_state([x], squared)
            assert bits.equal(state, portable.state([x], squared))
            held = sum(
                Fraction(2) ** (32 * i + portable.LOWEST) * d
                for i, d in enumerate(state.tolist()[:-3])
            )
            assert held == true_sum(x, squared)
            found = round_state(state, torch.float64)
            assert found.item() == float(held)
            assert bits.equal(found, portable.round_state(state, torch.float64))
            narrow = round_state(state)
            assert bits.equal(narrow, portable.round_state(state, torch.float32))
            if not squared:
                assert bits.equal(narrow, torch.tensor(defined_fp32(x.double().tolist())))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("squared", [False, True])
def test_no_bit_is_lost_where_a_level_ends(dtype, squared):
    """A kernel adds a block at one level, at two or at more, by the ratio of its largest and smallest values."""
    largest = torch.nextafter(torch.tensor(2.0, dtype=dtype), torch.tensor(0.0, dtype=dtype))
    for ratio in (1, *range(10, 17), *range(19, 23), *range(33, 39), 59):
        x = largest.expand(2048).clone()
        x[1::3] = -largest
        x[::7] = torch.ldexp(largest.float(), torch.tensor(-ratio)).to(dtype)  # the last bit is set
        x[5] = 0.0
        assert bits.equal(exact_state([x], squared), portable.state([x], squared)), ratio


HARD = {
    "nothing": [],
    "zeros of both signs": [-0.0, -0.0],
    "a tie that a far bit decides": [1.0, 2.0**-24, 2.0**-149],
    "a tie to even": [1.0, 2.0**-24],
    "a tie from below": [1.0, 2.0**-24, -(2.0**-149)],
    "cancellation": [2.0**100, 1.0, -(2.0**100), 2.0**-100],
    "subnormals": [2.0**-149] * 3,
    "the largest and a half": [3.4028234663852886e38, 2.0**103],
    "just below overflow": [3.4028234663852886e38, 2.0**102],
    "negative": [-1.0, -(2.0**-24), -(2.0**-140)],
    "one infinity": [math.inf, 1.0, -3e38],
    "two of one sign": [-math.inf, -math.inf],
    "two of both": [math.inf, -math.inf],
    "nan": [math.nan, 1.0],
    "nan and infinity": [math.nan, math.inf],
}


@pytest.mark.parametrize("name", HARD)
def test_hard_sums(name):
    x = torch.tensor(HARD[name], dtype=torch.float32)
    want = torch.tensor(defined_fp32(HARD[name]))
    for padded in (x, torch.cat([torch.zeros(3000), x, torch.zeros(17)])):
        assert bits.equal(exact_sum(padded), want)
        assert bits.equal(portable.exact_sum(padded), want)
        assert bits.equal(
            exact_sum(padded.double()), torch.tensor(defined_fp64(HARD[name]), dtype=torch.float64)
        )
    squares = round_state(exact_state([x], squared=True), torch.float64).item()
    if all(map(math.isfinite, HARD[name])):
        assert squares == float(true_sum(x, True))
    else:
        assert math.isnan(squares) == any(map(math.isnan, HARD[name]))
        assert math.isnan(squares) or squares == math.inf


def test_dtypes_mix_and_nothing_is_zero():
    parts = [wide(300, dtype) for dtype in DTYPES]
    merged = sum(exact_state([p], True) for p in parts) + exact_state([])
    assert bits.equal(round_state(exact_state(parts, True)), round_state(merged))
    assert round_state(exact_state([])).item() == 0.0


def test_flush_denormal_mode_does_not_reach_the_kernels():
    x = torch.full((100,), 2.0**-149)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("no flush mode here")
        found = exact_sum(x)
    finally:
        torch.set_flush_denormal(False)
    assert bits.equal(found, torch.tensor(100 * 2.0**-149))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_gradients(dtype):
    x = torch.randn(3, 5).to(dtype).requires_grad_()
    total = exact_sum(x)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (grad,) = torch.autograd.grad(total * 0.3, x)
    assert bits.equal(grad, torch.full_like(x, 0.3).detach())


def test_torchs_own_checks():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(exact_sum, (x,))
    torch.library.opcheck(torch.ops.isobit.portable_exact_sum, (x,))
    narrow = x.detach().float().requires_grad_()
    plain = torch.autograd.grad(exact_sum(narrow), narrow)[0]
    if dispatch.has_native():
        torch.library.opcheck(torch.ops.isobit.exact_sum, (narrow,))
    compiled = torch.compile(lambda t: exact_sum(t), fullgraph=True, backend="aot_eager")
    assert bits.equal(compiled(narrow), exact_sum(narrow))
    assert bits.equal(torch.autograd.grad(compiled(narrow), narrow)[0], plain)


@pytest.mark.parametrize(
    "wrong", [torch.ones(3).int(), torch.eye(2).to_sparse(), [1.0], torch.ones(2).cfloat()]
)
def test_refusals(wrong):
    with pytest.raises(ArgumentError, match="remedy"):
        exact_sum(wrong)
    with pytest.raises(ArgumentError, match="remedy"):
        exact_state([torch.ones(1), wrong])


def test_fp64_has_no_digits():
    with pytest.raises(ArgumentError, match="float64"):
        exact_state([torch.ones(1, dtype=torch.float64)])
