"""The Triton executor of linear computes the plan's expressions, in every form, for every batch.

1. Compiled code: names and bits of y, dX, dW and db are the plan's over the tensor core of the target.
2. Forms for few and many rows are one expression; a row does not depend on the others.
3. In fp32 all bits are those of the CPU's executor, also of hard values, odd extents, and empty samples.
4. Another number of segments, and other sample segments, are caught.
"""

import pytest
import torch

import isobit
from isobit.errors import UnsupportedError
from isobit.ops.attesting import wide_values

pytest.importorskip("triton")
import triton
import triton.language as tl

from isobit.certifying import executing
from isobit.certifying.running.backends import compiler_for
from isobit.ops.gpu.executors import prepare
from isobit.ops.linear import triton as executor
from isobit.order.plan import FeaturePlan
from tests.gpu.named_launches import (
    Plan,
    count_differences,
    forward,
    input_grad,
    run_named,
    weight_grad,
)
from tests.sweeps import mostly_full

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
full = pytest.mark.full
# One combination of each dtype and each target is always run.
COMPILED = [
    pytest.param(dtype, target, marks=[] if number in (0, 5) else full)
    for number, (dtype, target) in enumerate(
        (dtype, target) for target in ("sm_80", "sm_90", "sm_100") for dtype in (F32, F16, BF16)
    )
]


def draw(*shape, dtype, seed=0):
    return wide_values(shape, dtype, torch.Generator().manual_seed(seed))


def linear_inputs(dtype, rows, columns, extent):
    return {
        "x": draw(rows, extent, dtype=dtype, seed=1),
        "weight": draw(columns, extent, dtype=dtype, seed=2),
        "bias": draw(columns, dtype=dtype, seed=3),
    }


def check(target, inputs, function, expected):
    y, found, opcodes = run_named(target, inputs, function)
    from isobit.certifying.names.leaf import ENGINE_OF_TARGET

    want = Plan(inputs, ENGINE_OF_TARGET[target])(expected)
    assert count_differences(y, found, want) == (0, 0)
    return found, opcodes


@pytest.fixture(autouse=True)
def ready():
    assert callable(isobit.linear)
    prepare("linear", F32)


def by_rows(monkeypatch, many):
    """Take as many rows for many."""
    monkeypatch.setattr(executor, "MANY_ROWS", many)


# ---- compiled code ------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "target"), COMPILED)
def test_forward_has_the_expressions_of_the_plan(dtype, target):
    check(target, linear_inputs(dtype, 5, 20, 520), isobit.linear, forward)


@pytest.mark.parametrize(("dtype", "target"), COMPILED)
def test_gradients_have_the_expressions_of_the_plan(dtype, target):
    ops, samples = torch.ops.isobit, isobit.Samples.packed([258, 0, 5, 3])
    grad, weight = draw(3, 514, dtype=dtype, seed=4), draw(514, 18, dtype=dtype, seed=5)
    check(target, {"grad": grad, "weight": weight}, ops.triton_linear_input_grad, input_grad)
    tokens = {
        "grad": draw(266, 18, dtype=dtype, seed=6),
        "x": draw(266, 21, dtype=dtype, seed=7),
    }

    def sum_tokens(grad, x):
        return ops.triton_linear_weight_grad(grad, x, torch.tensor(samples.spans), 0)

    check(target, tokens, sum_tokens, weight_grad(samples))


@pytest.mark.parametrize(
    ("target", "instruction"),
    [("sm_90", "wgmma"), pytest.param("sm_100", "tcgen05", marks=full)],
)
def test_many_rows_are_the_same_expression(target, instruction, monkeypatch):
    """The counter on the largest instruction of a target, and one program per segment on the smallest."""
    inputs = linear_inputs(BF16, 3, 20, 1024)
    few, small = check(target, inputs, isobit.linear, forward)
    by_rows(monkeypatch, 1)
    many, large = check(target, inputs, isobit.linear, forward)
    assert (few == many).all()
    assert any(op.startswith(instruction) for op in large)
    assert any(op.startswith("mma.sync") for op in small)


@full
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_few_rows_with_enough_tiles_are_the_same_expression(target, monkeypatch):
    """The counter with two pairs in registers, on the tile of few rows."""
    monkeypatch.setattr(executor, "ENOUGH", 1)
    check(target, linear_inputs(BF16, 17, 20, 2048), isobit.linear, forward)


def test_other_segments_are_caught(monkeypatch):
    inputs = linear_inputs(F32, 2, 16, 1024)
    monkeypatch.setattr(FeaturePlan, "count", property(lambda self: 1))
    y, found, _ = run_named("sm_80", inputs, isobit.linear)
    monkeypatch.undo()
    names, bits = count_differences(y, found, Plan(inputs, "tc24x8")(forward))
    assert names == 32
    assert bits > 0


def test_other_segments_of_samples_are_caught(monkeypatch):
    samples = isobit.Samples.packed([3, 4, 5, 6])
    inputs = {"grad": draw(18, 16, dtype=F32, seed=8), "x": draw(18, 16, dtype=F32, seed=9)}

    def sum_tokens(grad, x):
        return torch.ops.isobit.triton_linear_weight_grad(grad, x, torch.tensor(samples.spans), 0)

    monkeypatch.setattr(executor, "segment_size", lambda of: 4)  # one segment, folded left
    y, found, _ = run_named("sm_80", inputs, sum_tokens)
    names, bits = count_differences(y, found, Plan(inputs, "tc24x8")(weight_grad(samples)))
    assert names == 256
    assert bits > 0


@triton.jit(do_not_specialize=["parts"])
def merge_from_the_left(
    sums: tl.tensor, dw: tl.tensor, parts: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Add the parts from left to right."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(sums + at, mask=at < SIZE)
    for part in range(1, parts):
        total = total + tl.load(sums + part * SIZE + at, mask=at < SIZE)
    tl.store(dw + at, total.to(dw.dtype.element_ty), mask=at < SIZE)


@pytest.mark.parametrize("programs", [0, 2, 8])
def test_small_and_large_weights_are_the_same_expression(monkeypatch, programs):
    """The samples of a small weight's gradient are split over up to `programs` programs."""
    samples = isobit.Samples.packed([3, 260, 0, 1, 2, 4, 1, 5])
    inputs = {"grad": draw(276, 18, dtype=F32, seed=8), "x": draw(276, 21, dtype=F32, seed=9)}

    def sum_tokens(grad, x):
        return torch.ops.isobit.triton_linear_weight_grad(grad, x, torch.tensor(samples.spans), 0)

    want = weight_grad(samples)
    monkeypatch.setattr(executor, "ENOUGH", programs)
    check("sm_90", inputs, sum_tokens, want)
    if programs == 8:  # Wrong: not the tree.
        monkeypatch.setattr(executor, "merge_parts", merge_from_the_left)
        y, found, _ = run_named("sm_90", inputs, sum_tokens)
        names, bits = count_differences(y, found, Plan(inputs, "tc25x16")(want))
        assert (names, bits > 0) == (18 * 21, True)


def test_binaries_do_not_grow_with_rows_or_samples():
    weight, counts = draw(16, 32, dtype=BF16).requires_grad_(), []
    with executing("machine", target="sm_80"):
        for lengths in ([1], [2, 1], [3, 0, 1, 2], [1] * 6):
            x = draw(sum(lengths), 32, dtype=BF16).requires_grad_()
            y = isobit.linear(x, weight, samples=isobit.Samples.packed(lengths))
            y.backward(torch.ones_like(y))
            counts.append(len(compiler_for("sm_80").done))
    assert len(set(counts)) == 1


# ---- interpreted --------------------------------------------------------------------------------
def all_results(x, weight, bias, samples=None):
    """Return y and all gradients."""
    given = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = isobit.linear(*given, samples=samples)
    grads = torch.autograd.grad(y, given, draw(*y.shape, dtype=y.dtype, seed=11))
    return [y.detach(), *grads]


def interpret(function, *args, target="sm_90"):
    with executing("interpreter", target=target):
        return function(*args)


SHAPES = [
    # rows, columns, extent, lengths of samples
    (7, 1, 1, None),
    (0, 3, 8, None),
    (3, 0, 8, None),
    (3, 4, 0, None),
    (5, 9, 1026, [2, 0, 3, 0]),
    (9, 17, 270, [1, 1, 7]),
    (270, 3, 5, [258, 0, 7, 5]),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_has_the_bits_of_the_cpu(shape):
    rows, columns, extent, lengths = shape
    given = linear_inputs(F32, rows, columns, extent).values()
    samples = isobit.Samples.packed(lengths) if lengths else None
    pairs = zip(all_results(*given, samples), interpret(all_results, *given, samples), strict=True)
    assert all(isobit.bits.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("many", [1, 128])
@pytest.mark.sweep(1)
def test_hard_values_in_fp32(many, monkeypatch):
    by_rows(monkeypatch, many)
    x, weight, bias = linear_inputs(F32, 8, 5, 1024).values()
    x[1, 7], x[2, 3], x[3, 900], x[4] = torch.nan, torch.inf, -torch.inf, -0.0
    x[5] *= 2.0**-140
    x[2, 4], weight[2] = -torch.inf, weight[2] * 2.0**-120
    expected, received = all_results(x, weight, bias), interpret(all_results, x, weight, bias)
    assert expected[0].isnan().any()
    assert all(isobit.bits.equal(a, b) for a, b in zip(expected, received, strict=True))


@pytest.mark.parametrize("target", mostly_full(["sm_80", "sm_90"], ["sm_90"]))
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_hard_values_in_16_bits(dtype, target):
    """NaN, infinities, subnormals and overflow, against the plan over the target's tensor core."""
    inputs = linear_inputs(dtype, 8, 5, 520)
    x = inputs["x"]
    x[1, 7], x[2, 3], x[3, 300], x[4] = torch.nan, torch.inf, -torch.inf, -0.0
    x[5] *= 2.0**-130 if dtype == BF16 else 2.0**-16
    x[6] *= 1000.0
    y = interpret(isobit.linear, *inputs.values(), target=target)
    engine = {"sm_80": "tc24x8", "sm_90": "tc25x16"}[target]
    _, values = Plan(inputs, engine)(forward)
    expected = torch.from_numpy(values.view("int16")).view(dtype)
    assert y.isnan().any()
    assert isobit.bits.equal(y, expected)


@pytest.mark.parametrize("many", [1, 3, 128])
def test_a_row_does_not_depend_on_its_batch(many, monkeypatch):
    """Rows of a batch of three are each alone: with 3, the batch and its rows have different forms."""
    by_rows(monkeypatch, many)
    x, weight, bias = linear_inputs(BF16, 3, 9, 1040).values()
    whole = interpret(isobit.linear, x, weight, bias)
    alone = [interpret(isobit.linear, x[i : i + 1], weight, bias) for i in range(3)]
    assert isobit.bits.equal(whole, torch.cat(alone))


@pytest.mark.full
def test_more_tiles_than_one_launch_has_memory_for(monkeypatch):
    given = linear_inputs(F32, 5, 70, 1024).values()
    expected = all_results(*given, isobit.Samples.packed([2, 3]))
    by_rows(monkeypatch, 1)
    monkeypatch.setattr(executor, "SCRATCH", 1)
    received = interpret(all_results, *given, isobit.Samples.packed([2, 3]))
    assert all(isobit.bits.equal(a, b) for a, b in zip(expected, received, strict=True))


def test_the_gradient_of_a_share_is_not_rounded():
    grad, x = draw(4, 3, dtype=BF16, seed=1), draw(4, 5, dtype=BF16, seed=2)
    spans = torch.tensor(isobit.Samples.packed([1, 3]).spans)
    with executing("interpreter"):
        dw = torch.ops.isobit.triton_linear_weight_grad(grad, x, spans, 4)
        db = torch.ops.isobit.triton_linear_bias_grad(grad, spans, 4)
        whole = torch.ops.isobit.triton_linear_weight_grad(grad, x, spans, 2)
    assert (dw.dtype, db.dtype, whole.dtype) == (F32, F32, BF16)
    assert isobit.bits.equal(dw.to(BF16), whole)


def test_a_group_sums_its_input_gradient_once():
    x, weights = draw(2, 5, 48, dtype=F32), [draw(n, 48, dtype=F32, seed=n) for n in (8, 4, 4)]

    def results():
        given = [t.detach().clone().requires_grad_() for t in (x, *weights)]
        ys = isobit.linear_group(given[0], given[1:], groups=2)
        upstream = [draw(*y.shape, dtype=F32, seed=y.shape[-1]) for y in ys]
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, given, upstream)]

    expected, received = results(), interpret(results)
    assert len(expected) == 7
    assert all(isobit.bits.equal(a, b) for a, b in zip(expected, received, strict=True))


def test_what_cannot_be_addressed_is_refused(monkeypatch):
    monkeypatch.setattr(executor, "ADDRESSABLE", 12)
    with pytest.raises(UnsupportedError, match="fewer than 2\\^31 elements"):
        interpret(isobit.linear, torch.ones(1, 3), torch.ones(4, 3))
