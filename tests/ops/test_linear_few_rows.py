"""Few rows are computed from the weight as it lies in memory: the same bits as in a large batch."""

import pytest
import torch

import isobit
from isobit import bits
from isobit.ops.linear.op import linear_fp32

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (17, 5), (256, 16), (300, 33), (1000, 77), (1024, 64), (3072, 48), (4099, 19))


def wide(*shape: int) -> torch.Tensor:
    """Full mantissas, exponents from -8 to 8, both signs, some zeros of both signs."""
    values = torch.randn(shape) * torch.exp2(torch.randint(-8, 9, shape).float())
    values[torch.rand(shape) < 0.02] = -0.0
    return values


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bits.digest(found) == bits.digest(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_have_the_bits_of_a_large_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compared = 0
    for length, outputs in SHAPES:
        x, weight = wide(40, length).to(dtype), wide(outputs, length).to(dtype)
        bias = wide(outputs).to(dtype)
        whole, logits = isobit.linear(x, weight, bias), linear_fp32(x, weight)
        for rows in range(1, 20):
            assert agree(isobit.linear(x[:rows], weight, bias), whole[:rows].contiguous())
            assert agree(linear_fp32(x[:rows], weight), logits[:rows].contiguous())
            compared += 2
    assert compared == 2 * 19 * len(SHAPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_special_values(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    base = wide(66, 520).to(dtype)
    x = wide(40, 513).to(dtype)
    x[0, 3], x[1, 7], x[2] = float("inf"), float("nan"), 0.0
    x[3] = torch.finfo(dtype).smallest_normal / 4  # subnormal
    layouts = {
        "a slice of columns": base[:, 3:516],
        "every second row": base[::2, :513],
        "transposed": base[:, :513].t().contiguous().t(),
        "one row for all": base[:1, :513].expand(33, 513),
    }
    for name, weight in layouts.items():
        whole = isobit.linear(x, weight.clone())
        for rows in (1, 2, 3, 4, 8, 13):
            assert agree(isobit.linear(x[:rows], weight), whole[:rows].contiguous()), (name, rows)
            strided = x.repeat_interleave(2, 0)[::2][:rows]
            assert agree(isobit.linear(strided, weight), whole[:rows].contiguous()), (name, rows)


def test_no_rows_no_outputs_and_no_products() -> None:
    assert isobit.linear(torch.zeros(0, 8), torch.zeros(4, 8)).shape == (0, 4)
    assert isobit.linear(torch.zeros(2, 8), torch.zeros(0, 8)).shape == (2, 0)
    empty = isobit.linear(torch.zeros(2, 0), torch.zeros(4, 0))
    assert agree(empty, torch.zeros(2, 4))


def test_flush_to_zero_of_the_caller_has_no_effect() -> None:
    x, weight = torch.full((1, 64), 1e-30), torch.full((32, 64), 1e-12)
    expected = isobit.linear(x, weight)
    try:
        torch.set_flush_denormal(True)
        assert agree(isobit.linear(x, weight), expected)
    finally:
        torch.set_flush_denormal(False)
    assert expected[0, 0] > 0
