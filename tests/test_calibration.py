"""Theorem: statistics of calibration have the same bits for every batch, thread count and number of ranks."""

from fractions import Fraction
from importlib.util import find_spec

import pytest
import torch

from isobit import bits
from isobit.calibration import (
    ColumnNorms,
    Hessian,
    Ranges,
    gptq_statistics,
    inverse_factor,
    sparsegpt_statistics,
    wanda_statistics,
)
from isobit.calibration.adapters import sparsify
from isobit.errors import ArgumentError, UnsupportedError
from isobit.foundation.machine import thread_count

SAMPLES, TOKENS, COLUMNS = 16, 20, 64


def activations(dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    mix = torch.randn(COLUMNS, COLUMNS, generator=make) * torch.logspace(0, 2.5, COLUMNS)
    return (torch.randn(SAMPLES, TOKENS, COLUMNS, generator=make) @ mix).to(dtype)


def stock_hessian(x, batch):
    """llm-compressor's accumulation."""
    total = torch.zeros(COLUMNS, COLUMNS)
    for part in x.float().split(batch):
        rows = part.reshape(-1, COLUMNS)
        total += rows.t() @ rows
    return total * (2 / SAMPLES)


def gathered(kind, x, batch, ranks):
    """The statistics of ranks that have every rank-th block of samples, merged."""
    found = [kind(COLUMNS) for _ in range(ranks)]
    per = SAMPLES // ranks
    for rank, one in enumerate(found):
        mine = x[rank * per : (rank + 1) * per]
        for at in range(0, per, batch):
            where = {"first": rank * per + at} if kind is Hessian else {}
            one.add(mine[at : at + batch], **where)
    return found[0].merge(found[1:]).value()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Hessian, ColumnNorms, Ranges])
def test_batch_threads_and_ranks_change_no_bit(kind, dtype):
    x = activations(dtype)
    wanted = gathered(kind, x, SAMPLES, 1)
    for threads in (1, 2):
        with thread_count(threads):
            for batch in (1, 4, 8):
                for ranks in (1, 2, 4):
                    found = gathered(kind, x, batch, ranks)
                    both = zip(found, wanted, strict=True) if kind is Ranges else [(found, wanted)]
                    assert all(bits.equal(a, b) for a, b in both), (threads, batch, ranks)


def test_stock_differs_with_the_batch():
    x = activations()
    assert not bits.equal(stock_hessian(x, SAMPLES), stock_hessian(x, 1))


def test_values_are_right():
    x = activations()
    rows = x.reshape(-1, COLUMNS).double()
    hessian, norms, ranges = (gathered(kind, x, 4, 1) for kind in (Hessian, ColumnNorms, Ranges))
    exact = rows.t() @ rows * (2 / SAMPLES)
    size = rows.abs().t() @ rows.abs() * (2 / SAMPLES)
    assert bool(((hessian.double() - exact).abs() <= size * 2.0**-24 * (SAMPLES * TOKENS)).all())
    column = ColumnNorms(COLUMNS)
    column.add(x)
    wanted = sum(Fraction(v) ** 2 for v in x.reshape(-1, COLUMNS)[:, 3].tolist())
    assert column.squares()[3] == wanted
    assert float(norms[3]) == pytest.approx(float(wanted) ** 0.5, rel=2**-52)
    assert bits.equal(ranges[0], x.reshape(-1, COLUMNS).amin(0))


def test_norms_and_ranges_have_no_order_and_extremes_are_exact():
    x = torch.tensor([[1e-45, 3e38], [3e38, 1e-45], [0.0, -0.0], [1e-30, 1.0]])
    for kind in (ColumnNorms, Ranges):
        one, other = kind(2), kind(2)
        one.add(x)
        for row in x.flip(0):
            other.add(row[None])
        found, wanted = one.value(), other.value()
        pairs = zip(found, wanted, strict=True) if kind is Ranges else [(found, wanted)]
        assert all(bits.equal(a, b) for a, b in pairs)
    one = ColumnNorms(2)
    one.add(x)
    assert one.squares() == [sum(Fraction(v) ** 2 for v in x[:, i].tolist()) for i in range(2)]
    one.add(torch.tensor([[torch.nan, 1.0]]))
    assert one.value().isnan().tolist() == [True, False]


def test_a_planted_order_is_found():
    """A Hessian that adds batches in sequence differs, so that the comparison above can fail."""
    x = activations()

    def by_batches(batch):
        total = torch.zeros(COLUMNS, COLUMNS)
        for part in x.split(batch):
            one = Hessian(COLUMNS)
            one.add(part)
            total = total + one.total()
        return total

    assert not bits.equal(by_batches(1), by_batches(4))


def test_samples_that_are_missing_or_twice_are_refused():
    x = activations()
    one, other = Hessian(COLUMNS), Hessian(COLUMNS)
    one.add(x[:2], first=0)
    other.add(x[1:3], first=1)
    with pytest.raises(ArgumentError, match="without a gap"):
        one.merge([other]).value()
    with pytest.raises(ArgumentError, match="every sample once"):
        other.add(x[:1], first=2)
    late = Hessian(COLUMNS)
    late.add(x[:2], first=4)
    with pytest.raises(ArgumentError, match="without a gap"):
        late.value()
    with pytest.raises(ArgumentError, match="lengths that add up"):
        one.add(x[0], lengths=[3])
    with pytest.raises(ArgumentError, match="activations"):
        one.add(torch.zeros(3, 5))


def test_the_factor_is_right_and_does_not_depend_on_threads():
    x = activations().reshape(-1, COLUMNS).double()
    h = x.t() @ x / 1e4 + torch.eye(COLUMNS, dtype=torch.float64)
    with thread_count(1):
        one = inverse_factor(h)
    with thread_count(2):
        assert bits.equal(inverse_factor(h), one)
    wanted = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    assert torch.allclose(one, wanted, rtol=1e-6, atol=1e-9)
    assert bits.equal(one.tril(-1), torch.zeros_like(one))
    with pytest.raises(ArgumentError, match="positive definite"):
        inverse_factor(-torch.eye(3))


@pytest.mark.parametrize(
    ("adapter", "package", "name"),
    [
        (gptq_statistics, "llmcompressor", "llm-compressor"),
        (sparsegpt_statistics, "llmcompressor", "llm-compressor"),
        (wanda_statistics, "torchao", "torchao"),
    ],
)
def test_a_missing_tool_is_named_and_nothing_stays_replaced(adapter, package, name):
    before = torch.nn.Linear.forward
    if find_spec(package) is None:
        with pytest.raises(UnsupportedError, match=name), adapter():
            pass
    else:
        with adapter():
            assert torch.nn.Linear.forward is not before
    assert torch.nn.Linear.forward is before


# ---- the tools themselves; each test needs its package: pip install llmcompressor==0.14.0.1 torchao==0.18.0


def test_sparsify_prunes_as_sparsegpt_does_and_does_not_depend_on_threads():
    make = torch.Generator().manual_seed(2)
    x = activations().reshape(-1, COLUMNS)
    hessian = x.T @ x / 1e4

    def run(**structure):
        layer = torch.nn.Linear(COLUMNS, 24, bias=False)
        layer.weight.data = torch.randn(24, COLUMNS, generator=make.manual_seed(2))
        options = {"prune_n": 0, "prune_m": 0, **structure}
        return layer.weight.data, *sparsify(
            layer, {layer: hessian.clone()}, 0.5, **options, block_size=16,
            dampening_frac=0.01, preserve_sparsity_mask=False,
        )  # fmt: skip

    with thread_count(1):
        weight, loss, one = run()
    with thread_count(2):
        assert bits.equal(run()[2], one)
    # A block of 16 columns loses its threshold too: 24 · 16 / 2 + 1.
    assert [int((part == 0).sum()) for part in one.split(16, 1)] == [193] * 4
    assert loss > 0
    # The layer's output changes less than if the same weights had only been set to zero.
    plain = torch.where(one == 0, 0.0, weight)
    errors = [float(((w - weight) @ x.T).square().sum()) for w in (one, plain)]
    assert errors[0] < errors[1]
    groups = run(prune_n=2, prune_m=4)[2].reshape(24, -1, 4)
    assert bool(((groups == 0).sum(-1) == 2).all())
    with pytest.raises(UnsupportedError, match="linear layers"):
        sparsify(torch.nn.Conv1d(2, 2, 1), {}, 0.5, 0, 0, 16, 0.01, False)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["GPTQ W4A16", "SparseGPT 0.5"])
def test_llm_compressor_makes_one_model_for_every_batch_and_thread_count(kind, capsys):
    pytest.importorskip("llmcompressor")
    from benchmarks.post_training import compressed, differing_models, recipes

    modifier, adapter = recipes()[kind]
    runs = [{"batch": batch, "threads": threads} for batch in (1, 8) for threads in (1, 2)]
    stock = [compressed(modifier, **run) for run in runs[:3]]
    with adapter():
        found = [compressed(modifier, **run) for run in runs]
    counts = [differing_models(one, found[0]).differ for one in found[1:]]
    control = [differing_models(one, stock[0]).differ for one in stock[1:]]
    total = differing_models(*found[:2]).of
    with capsys.disabled():
        print(f"\n{kind}: stock {control}, isobit {counts} of {total:,} weights differ")
    assert counts == [0, 0, 0]
    assert all(control)
    # It is the tool's own result up to roundings: hardly any weight is zero in one and not in the other.
    apart = sum(int(((stock[0][n] == 0) != (w == 0)).sum()) for n, w in found[0].items())
    assert apart < total / 100


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_torchao_wanda_makes_one_mask_for_every_batch(capsys):
    sparsity = pytest.importorskip("torchao.sparsity")
    x = torch.randn(64, 500, generator=torch.Generator().manual_seed(5)).bfloat16()

    def mask(batch, threads=1, order=slice(None)):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(500, 200, bias=False)).bfloat16()
        with thread_count(threads):
            sparsifier = sparsity.WandaSparsifier(sparsity_level=0.5)
            sparsifier.prepare(model, config=None)
            for part in x[order].split(batch):
                model(part)
            sparsifier.step()
            sparsifier.squash_mask()
        return model[0].weight == 0

    control = [int((mask(64) != mask(batch)).sum()) for batch in (8, 1)]
    with wanda_statistics():
        whole = mask(64)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(6))
        found = [mask(8), mask(1), mask(64, threads=2), mask(8, order=order)]
    counts = [int((whole != one).sum()) for one in found]
    with capsys.disabled():
        print(f"\nWanda: stock {control}, isobit {counts} of {whole.numel():,} mask bits differ")
    assert counts == [0] * 4
    assert all(control)
    assert int(whole.sum()) == whole.numel() // 2
