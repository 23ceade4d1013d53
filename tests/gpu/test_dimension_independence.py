"""Theorem (DIM-001): a kernel that takes sizes at launch has the bits of the same kernel compiled for one shape.

In the PTX machine, in fp32 and bf16. In fp32 both are within 1e-5 of stock, relative to the row's largest value.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import isobit
from isobit.certifying import executing
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store.tree import library
from isobit.library.on_gpu.plans import derive
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
    assert any("m" in names for _, names in made)
    with executing("machine", target=target):
        assert isobit.bits.equal(isobit.linear(x, weight), special)


def test_another_order_has_other_bits():
    """One segment in place of two is right within the limit, and has other bits."""
    x, weight = problem(F32, 3, 18, 768)
    wrong, _ = launch_by_sizes("sm_90", x, weight, TILE, wrong=1)
    assert distance(wrong, F.linear(x, weight)) <= LIMIT
    assert not isobit.bits.equal(wrong, isobit.linear(x, weight))


def compiles_for_rows(x, weight, bias):
    """A binary per number of rows: N is a constant of the kernel, and here it follows them."""
    more = torch.cat([weight, weight[:1].expand(len(x), -1)])
    return isobit.linear(x, more)[:, : len(weight)] + bias


@pytest.mark.parametrize("claim", ["made-for-the-shape", pytest.param("binaries", marks=full)])
def test_the_contract_is_judged_on_compiled_kernels(claim):
    contract = derive(load_contract(library() / "dimension_independent.contract.yaml")).contract
    alone = replace(contract, claims=tuple(c for c in contract.claims if c.id == claim))
    with executing("machine", target="sm_90"):
        (record,) = verify_contract(alone, Options())
    assert (record.verdict, {p.caught for p in record.planted}) == ("kept", {True})


@full
def test_a_binary_per_number_of_rows_is_found():
    contract = derive(load_contract(library() / "dimension_independent.contract.yaml")).contract
    alone = replace(
        contract,
        claims=tuple(c for c in contract.claims if c.id == "binaries"),
        subject="tests.gpu.test_dimension_independence:compiles_for_rows",
        output=(),
    )
    with executing("machine", target="sm_90"):
        (record,) = verify_contract(alone, Options(trusted=("tests",)))
    assert record.verdict == "broken"
