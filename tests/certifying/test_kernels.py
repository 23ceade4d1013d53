"""Compiled Triton kernels: bits of the leaf model, one expression over tiles, and what parts them."""

import numpy as np
import pytest

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.names import names as nm
from isobit.certifying.names.leaf import multiply_accumulate, rule_of
from isobit.certifying.ptx import parse

pytest.importorskip("triton")
from tests.certifying.triton_kernels import compiled, matmul, row_sum, softmax

RNG = np.random.default_rng(3)


def bf16(shape):
    return (RNG.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def run_matmul(dtype, tile, a, b, capability=80, engine="tc24x8", **options):
    """C of one kernel: its bits, its names and the machine."""
    types = {"A": f"*{dtype}", "B": f"*{dtype}", "C": "*fp32"}
    constants = dict(zip(("BM", "BN", "BK"), tile, strict=True))
    ptx, shared = compiled(matmul, types, constants, capability, num_stages=2)
    (m, k), n = a.shape, b.shape[0]
    out = Buffer(np.zeros((m, n), np.float32), label="C")
    machine = Machine(parse(ptx), engine=engine, **options)
    grid = (-(-m // tile[0]) * -(-n // tile[1]),)
    machine.run(
        grid, [Buffer(a, label="A"), Buffer(b, label="B"), out, m, n, k], shared_bytes=shared
    )
    return out.data, out.element_names() if machine.names else None, machine


@pytest.fixture(scope="module")
def operands():
    return bf16((20, 64)), bf16((24, 64))


def test_matmul_has_the_bits_of_the_leaf_and_the_names_of_its_chain(operands):
    a, b = operands
    bits, names, machine = run_matmul("bf16", (16, 16, 32), a, b)
    zero = np.zeros((20, 24), np.float32)
    expected = multiply_accumulate(a, b, zero, "tc24x8", "bf16")
    np.testing.assert_array_equal(bits.view(np.uint32), expected.view(np.uint32))
    left, right = (
        nm.inputs(label, each.size, 16).reshape(each.shape) for label, each in (("A", a), ("B", b))
    )
    start = np.full(zero.shape, nm.constant_float(0.0))
    products = rule_of("tc24x8", "bf16").products
    chain = nm.dot_tile(left, right, start, "tc24x8", "bf16", products)
    assert (names == chain).all()
    assert machine.counts["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] > 0
    assert not machine.facts
    assert not machine.approximate


def test_tiles_are_one_expression_and_engines_are_not(operands):
    a, b = operands
    first = run_matmul("bf16", (16, 16, 32), a, b)
    wider = run_matmul("bf16", (32, 32, 64), a, b)
    assert (first[1] == wider[1]).all()
    np.testing.assert_array_equal(first[0].view(np.uint32), wider[0].view(np.uint32))
    other = run_matmul("bf16", (16, 16, 32), a, b, engine="tc25x16")
    assert (first[1] != other[1]).all()
    assert (first[0] != other[0]).any()


def test_fp32_matmul_is_a_chain_of_fma():
    a, b = (RNG.standard_normal((16, 32)).astype(np.float32) for _ in range(2))
    bits, names, _ = run_matmul("fp32", (16, 16, 16), a, b)
    left, right = (nm.input_names(label, 512, 32).reshape(16, 32) for label in "AB")
    chain = np.full((16, 16), nm.constant_float(0.0))
    for k in range(32):
        chain = nm.fma(left[:, None, k], right[None, :, k], chain)
    assert (names == chain).all()
    np.testing.assert_allclose(bits, a @ b.T, rtol=1e-4, atol=1e-5)


def test_maximum_over_blocks_is_one_expression():
    x = RNG.standard_normal((2, 96)).astype(np.float32)
    found = []
    for block, warps in ((32, 1), (64, 2), (128, 4)):
        types, constants = {"X": "*fp32", "Y": "*fp32"}, {"N": 96, "BLOCK": block}
        ptx, shared = compiled(softmax, types, constants, 80, num_warps=warps)
        out = Buffer(np.zeros((2, 96), np.float32), label="Y")
        machine = Machine(parse(ptx))
        machine.run((2,), [Buffer(x, label="X"), out], shared_bytes=shared)
        found.append(out.element_names())
        np.testing.assert_allclose(out.data, np.exp2(x - x.max(1, keepdims=True)), rtol=1e-6)
        assert machine.approximate
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_sums_by_warps_are_several_orders():
    x = RNG.standard_normal((1, 512)).astype(np.float32)
    found = set()
    for warps in (1, 2, 4):
        ptx, shared = compiled(
            row_sum, {"X": "*fp32", "Y": "*fp32"}, {"N": 512}, 80, num_warps=warps
        )
        out = Buffer(np.zeros(1, np.float32), label="Y")
        Machine(parse(ptx)).run((1,), [Buffer(x, label="X"), out], shared_bytes=shared)
        found.add(int(out.element_names()[0]))
    assert len(found) == 3


def test_the_machine_without_races_or_names_has_the_same_bits(operands):
    bits = [
        run_matmul("bf16", (16, 16, 32), *operands, **how)[0]
        for how in ({}, {"names": False, "races": False})
    ]
    np.testing.assert_array_equal(*(each.view(np.uint32) for each in bits))


# ---- recording ----------------------------------------------------------------------------------
def test_recorded_expressions(operands):
    a, b = operands
    _, names, machine = run_matmul("bf16", (16, 16, 32), a, b, record=True)
    recorded = machine.recorded
    assert recorded.complete
    tree = recorded.tree(names[3, 5], terms="A")
    chain = tuple(range(8))
    for start in range(8, 64, 8):
        chain = (chain, *range(start, start + 8))
    assert tree == chain
    assert recorded.describe(names[3, 5]) == "dot tc24x8 bf16 over A[3, 0:64], B[5, 0:64]"
    assert recorded.first_difference(names[3, 5], names[3, 5]) is None
    found = recorded.first_difference(names[3, 5], names[3, 6])
    assert found.left.operands[-1] == "products of A[3, 0:8], B[5, 0:8]"
    assert found.right.operands[-1] == "products of A[3, 0:8], B[6, 0:8]"
    assert found.left.ptx_line == found.right.ptx_line
    assert found.left.source[0].endswith("triton_kernels.py")


def test_first_difference_of_two_orders_of_a_sum():
    x = RNG.standard_normal((1, 64)).astype(np.float32)
    made = []
    for warps in (1, 2):
        ptx, shared = compiled(
            row_sum, {"X": "*fp32", "Y": "*fp32"}, {"N": 64}, 80, num_warps=warps
        )
        out, machine = Buffer(np.zeros(1, np.float32), label="Y"), Machine(parse(ptx), record=True)
        machine.run((1,), [Buffer(x, label="X"), out], shared_bytes=shared)
        made.append((machine.recorded, out.element_names()[0]))
    (first, one), (second, two) = made
    found = first.first_difference(one, two, second)
    assert found.left.operation == found.right.operation == "add"
    assert found.left.operands != found.right.operands
    assert all("X[0, " in each for each in found.left.operands + found.right.operands)
    trees = [recorded.tree(name, "X") for recorded, name in made]
    assert trees[0] != trees[1]
    from isobit.order.addition import steps_of

    assert all(len(steps_of(each)) == 63 for each in trees)
