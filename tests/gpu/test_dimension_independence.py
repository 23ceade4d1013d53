"""Theorem (DIM-001): a kernel that takes sizes at launch has the bits of the same kernel compiled for one shape.

In the PTX machine, in fp32 and bf16. In fp32 both are within 1e-5 of stock, relative to the row's largest value.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import isobit
from isobit.certifying import executing
from isobit.ops.attesting import wide_values
from tests.gpu.generic_kernels import launch_by_sizes, run_specialised

F32, BF16 = torch.float32, torch.bfloat16
TILE, LIMIT = (16, 16, 32), 1e-5
full = pytest.mark.full
CASES = [
    (F32, "sm_90", 3, 18, 768),  # two segments of a leaf and a half
    (BF16, "sm_90", 19, 5, 1024),
    pytest.param(F32, "sm_80", 17, 20, 1536, marks=full),
    pytest.param(BF16, "sm_80", 3, 33, 1536, marks=full),
    pytest.param(F32, "sm_100", 5, 16, 1024, marks=full),
    pytest.param(BF16, "sm_100", 33, 16, 512, marks=full),
]


def problem(dtype, rows, columns, extent):
    generator = torch.Generator().manual_seed(extent + rows)
    return [wide_values((n, extent), dtype, generator) for n in (rows, columns)]


def distance(found, exact):
    """The largest difference, relative to the largest value of its row."""
    largest = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return float(((found.double() - exact.double()).abs() / largest.double()).max())


@pytest.mark.parametrize(("dtype", "target", "rows", "columns", "extent"), CASES)
def test_generic_is_specialised(dtype, target, rows, columns, extent):
    x, weight = problem(dtype, rows, columns, extent)
    generic, text = launch_by_sizes(target, x, weight, TILE)
    special, other = launch_by_sizes(target, x, weight, TILE, constant=("M", "N", "K"))
    assert text.count(".param .u32") == other.count(".param .u32") + 3  # two programs, not one
    assert isobit.bits.equal(generic, special)
    with executing("machine", target=target):  # M at launch, N and K constants
        executor = isobit.linear(x, weight)
    assert isobit.bits.equal(generic, executor)
    if dtype == F32:
        stock = F.linear(x, weight)
        assert 0 <= distance(generic, stock) <= LIMIT
        assert isobit.bits.equal(generic, isobit.linear(x, weight))


@pytest.mark.parametrize(
    ("dtype", "target", "rows"),
    [(F32, "sm_90", 3), (BF16, "sm_90", 19), pytest.param(BF16, "sm_80", 130, marks=full)],
)
def test_executors_kernels_have_the_bits_of_kernels_made_for_their_rows(dtype, target, rows):
    x, weight = problem(dtype, rows, 18, 520)
    special, made = run_specialised(target, isobit.linear, x, weight)
    assert any("M" in names for _, names in made)
    with executing("machine", target=target):
        assert isobit.bits.equal(isobit.linear(x, weight), special)


def test_another_order_has_other_bits():
    """One segment in place of two is right within the limit, and has other bits."""
    x, weight = problem(F32, 3, 18, 768)
    wrong, _ = launch_by_sizes("sm_90", x, weight, TILE, wrong=1)
    assert distance(wrong, F.linear(x, weight)) <= LIMIT
    assert not isobit.bits.equal(wrong, isobit.linear(x, weight))
