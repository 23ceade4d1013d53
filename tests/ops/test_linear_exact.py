"""Every executor equals the exact evaluator, bit for bit, on small sizes: y, dX, dW and db, whole and in roots.

The sizes take every path of the plan: one segment, several, odd lengths, long segments, empty samples.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import isobit
from isobit import bits
from isobit.ops import dispatch
from isobit.ops.attesting import wide_values
from isobit.ops.linear import op, partial
from isobit.ops.portable.sums import multiply_add
from isobit.order.evaluate import ENGINES, add_fp32, evaluate, evaluate_segment
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples
from isobit.order.tree import merge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape, dtype, seed=0):
    return wide_values(shape, dtype, torch.Generator().manual_seed(seed))


def exact_matrix(segments, left, right, engine, bias=None):
    """left [R, k], right [C, k] → fp32 [R, C]."""
    a, b = left.double().tolist(), right.double().tolist()
    shift = [0.0] * len(b) if bias is None else bias.double().tolist()
    total = [
        [evaluate(segments, list(zip(row, col, strict=True)), ENGINES[engine]) for col in b]
        for row in a
    ]
    if bias is not None:
        total = [[add_fp32(v, s) for v, s in zip(row, shift, strict=True)] for row in total]
    return torch.tensor(total, dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 1, 1), (3, 31, 2), (2, 514, 3), (1, 1025, 2), (1, 4100, 1), (2, 1024, 1), (17, 65, 66)],
)
@pytest.mark.parametrize("executor", ["native", "portable"])
@pytest.mark.sweep(14)
def test_forward_and_input_gradient(dtype, m, k, n, executor):
    if executor == "native" and not dispatch.has_native():
        pytest.skip("no native kernels")
    x, w, b = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1), draw(n, dtype=dtype, seed=2)
    if executor == "native":
        y, dx, engine = (
            isobit.linear(x, w, b),
            torch.ops.isobit.linear_input_grad(x, w.t()),
            dispatch.engine_of(dtype),
        )
    else:
        y, dx, engine = op.portable_linear(x, w, b, None), op.portable_input_grad(x, w.t()), "chain"
    segments = FeaturePlan(k).products
    assert bits.first_difference(y, exact_matrix(segments, x, w, engine, b).to(dtype)) is None
    assert bits.first_difference(dx, exact_matrix(segments, x, w, engine).to(dtype)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths", [[3], [2, 0, 5], [1, 4, 0, 2], [300, 7], [0, 0], [33, 1, 1, 1, 65, 2]]
)
@pytest.mark.parametrize("executor", ["native", "portable"])
def test_parameter_gradients(dtype, lengths, executor):
    if executor == "native" and not dispatch.has_native():
        pytest.skip("no native kernels")
    samples = Samples.padded(lengths, width=max(lengths) + 2, side="left")
    grad, x = draw(samples.rows, 2, dtype=dtype), draw(samples.rows, 3, dtype=dtype, seed=1)
    spans = torch.tensor(samples.spans)
    if executor == "native":
        engine = dispatch.engine_of(dtype)
        isobit.linear(x, x)  # attests
        dw = torch.ops.isobit.linear_weight_grad(grad, x, spans)
        db = torch.ops.isobit.linear_bias_grad(grad, spans)
    else:
        engine = "chain"
        dw, db = op.portable_weight_grad(grad, x, spans), op.portable_bias_grad(grad, spans)
    want = exact_matrix(samples.segments, grad.t(), x.t(), engine).to(dtype)
    assert bits.first_difference(dw, want) is None
    ones = torch.ones(1, samples.rows)
    want = exact_matrix(samples.segments, grad.t(), ones, "striped")[:, 0].to(dtype)
    assert bits.first_difference(db, want) is None


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_native_equals_portable_where_the_engine_is_the_same(m, k, n, dtype, seed):
    if not dispatch.has_native() or dispatch.engine_of(dtype) != "chain":
        return
    x, w = draw(m, k, dtype=dtype, seed=seed), draw(n, k, dtype=dtype, seed=seed + 1)
    assert bits.first_difference(isobit.linear(x, w), op.portable_linear(x, w, None, None)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_are_the_segments_themselves(dtype):
    x, w = draw(2, 2048, dtype=dtype), draw(2, 2048, dtype=dtype, seed=1)
    plan, engine = FeaturePlan(2048), dispatch.engine_of(dtype)
    pieces = []
    for i in range(plan.count):
        cut = isobit.order.Cut(2048, plan.count, i)
        run = slice(cut.start, cut.start + cut.length)
        share = partial.output(x[:, run], w[:, run], cut)
        factors = list(zip(x[1].double().tolist(), w[0].double().tolist(), strict=True))
        want = evaluate_segment(plan.products[i], factors, ENGINES[engine])
        assert share.values[0, 1, 0].item() == want
        pieces.append(share)
    assert bits.equal(partial.merge(reversed(pieces), dtype=dtype), isobit.linear(x, w))
    tree = merge([p.values[0] for p in pieces], torch.add)
    assert bits.equal(tree.to(dtype), isobit.linear(x, w))
    with pytest.raises(isobit.CutError, match="exactly once"):
        partial.merge(pieces[:-1], dtype=dtype)
    with pytest.raises(isobit.CutError, match="exactly once"):
        partial.merge([*pieces, pieces[0]], dtype=dtype)
    with pytest.raises(isobit.CutError):
        partial.merge([], dtype=dtype)


def test_the_portable_fused_multiply_add_is_exact():
    from isobit.order.evaluate import fma_fp32

    values = torch.cat(
        [draw(400, dtype=torch.float32), torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-126, 3e38, 1.0])]
    )
    a, b, c = values, values.flip(0), values.roll(7) * 2.0**-20
    found = multiply_add(a, b, c).tolist()
    wanted = [fma_fp32(*t) for t in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert bits.equal(torch.tensor(found), torch.tensor(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_nan_in_every_executor_and_share(dtype):
    """torch's own rounding to bf16 makes another NaN than the kernels do."""
    x, weight = torch.randn(3, 512).to(dtype), torch.randn(40, 512).to(dtype)
    x[1, 3] = torch.nan
    whole = isobit.linear(x, weight)
    cuts = [isobit.order.Cut(512, 2, i) for i in range(2)]
    parts = [
        partial.output(x[:, c.start : c.start + 256], weight[:, c.start : c.start + 256], c)
        for c in cuts
    ]
    assert whole[1].isnan().all()
    for other in (partial.merge(parts, dtype=dtype), op.portable_linear(x, weight, None, None)):
        assert isobit.bits.equal(other[1], whole[1])
