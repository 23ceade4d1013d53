"""Every order that is known comes back exactly, and what is no tree of additions is refused."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import isobit
from isobit import RevealError, targets
from isobit.order.addition import chain, digest
from isobit.order.planted import plant_compensated, plant_tree
from isobit.order.reveal import reveal
from isobit.targets.tensor_target import TensorTarget
from tests.order.kernels import ORDERS, add_by, blocks, pairs, permuted, random_branch, stripes, target_of


@pytest.mark.parametrize("name", ORDERS)
def test_known_orders_come_back_at_4096(name):
    branch = ORDERS[name](4096)
    tree = reveal(target_of(branch, 4096, places=2048))
    assert tree.order_digest == digest(branch)
    assert tree.replayed == 8
    assert str(tree.arithmetic) == "fp32 sums, subnormals kept, -0 kept"


@settings(max_examples=60)
@given(n=st.integers(1, 300), name=st.sampled_from(sorted(ORDERS)))
def test_known_orders_come_back_at_any_size(n, name):
    branch = ORDERS[name](n)
    tree = reveal(target_of(branch, n, places=64))
    assert tree.order_digest == digest(branch)
    assert tree.replayed == (8 if n > 1 else 0)


@settings(max_examples=60)
@given(n=st.integers(2, 90), seed=st.integers(0, 10**6), places=st.sampled_from([1, 3, 64]))
def test_any_binary_tree_comes_back(n, seed, places):
    branch = random_branch(n, seed)
    assert reveal(target_of(branch, n, places)).order_digest == digest(branch)


@settings(max_examples=40)
@given(
    n=st.integers(20, 700),
    width=st.integers(2, 40),
    order=st.sampled_from([pairs, chain]),
    seed=st.integers(0, 10**6),
)
def test_families_come_back(n, width, order, seed):
    for branch in (stripes(n, width, order), blocks(n, width, order), permuted(n, seed)):
        assert reveal(target_of(branch, n, places=64), arithmetic=False).order_digest == digest(branch)


def test_few_probes():
    """A chain from either end, in any permutation, takes a small multiple of n."""
    for name in ("left fold", "right fold", "reversed", "permuted"):
        tree = reveal(target_of(ORDERS[name](1024), 1024), arithmetic=False)
        assert tree.probes < 6 * 1024, name


# ---- narrow, wide, fused ------------------------------------------------------------------------------------


def rounded_to(dtype):
    return lambda a, b: (a + b).to(dtype).float()


@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
@pytest.mark.parametrize("name", ["left fold", "16 stripes, pairs", "pairwise", "right fold", "random"])
def test_narrow_accumulators_are_counted_by_segments(dtype, word, name):
    n = 700
    branch = ORDERS[name](n)
    bits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    terms = torch.zeros(n, 64, dtype=dtype).t()
    run = lambda: add_by(branch, list(terms.t().float()), rounded_to(dtype))  # noqa: E731
    tree = reveal(TensorTarget("narrow", terms, run, output_bits=bits))
    assert tree.order_digest == digest(branch)
    assert str(tree.arithmetic).startswith(f"{word} sums")
    assert tree.replayed == 8


def test_a_wide_accumulator_is_seen():
    n, branch = 200, chain(range(200))
    terms = torch.zeros(n, 64).t()
    run = lambda: add_by(branch, list(terms.t().double())).float()  # noqa: E731
    tree = reveal(TensorTarget("wide", terms, run))
    assert tree.order_digest == digest(branch)
    assert "fp64 sums" in str(tree.arithmetic)
    assert tree.replayed == 8


def test_narrowing_at_merges_is_seen():
    """Four chains in fp32, each stored as bf16, then merged: as split-K with a bf16 workspace does."""
    n = 256
    branch = blocks(n, 64, chain)
    terms = torch.zeros(n, 64).t()

    def run():
        parts = [add_by(chain(range(64)), list(terms.t()[at : at + 64])).bfloat16().float() for at in range(0, n, 64)]
        return add_by(chain(range(4)), parts)

    tree = reveal(TensorTarget("split", terms, run))
    assert tree.order_digest == digest(branch)
    assert str(tree.arithmetic) == "fp32 sums, 4 additions rounded to bf16, subnormals kept, -0 kept"
    assert tree.arithmetic.widths.count(8) == 4
    assert tree != reveal(target_of(branch, n))
    assert tree.order_digest == reveal(target_of(branch, n)).order_digest


@pytest.mark.parametrize("fused", [True, False])
def test_products_fused_or_rounded_first(fused):
    n, branch = 100, chain(range(100))
    w, x = torch.zeros(n, 64).t(), torch.ones(n)

    def run():
        total = x[0] * w[:, 0]
        for k in range(1, n):
            product = x[k].double() * w[:, k].double()
            total = (total.double() + product).float() if fused else total + product.float()
        return total

    tree = reveal(TensorTarget("dot", w, run, "product", x))
    assert tree.order_digest == digest(branch)
    assert tree.arithmetic.products == ("fused" if fused else "rounded")
    assert tree.replayed == 8


def test_terms_cut_short_are_seen():
    """As TF32 does."""
    n = 64
    terms = torch.zeros(n, 64).t()

    def run():
        cut = (terms.t().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        return add_by(chain(range(n)), list(cut))

    tree = reveal(TensorTarget("tf32", terms, run))
    assert tree.arithmetic.terms_cut_to == 11
    assert "terms cut to 11 bits" in str(tree.arithmetic)
    assert tree.replayed == 8


def test_flushed_subnormals_are_seen():
    n, branch = 40, chain(range(40))
    tiny = 2.0**-126

    def add(a, b):
        a, b = (torch.where(v.abs() < tiny, 0.0, v) for v in (a, b))
        return torch.where((a + b).abs() < tiny, 0.0, a + b)

    tree = reveal(target_of(branch, n, add=add))
    assert str(tree.arithmetic) == "fp32 sums, subnormals are zero"


def test_an_accumulator_that_starts_from_zero_is_another_arithmetic():
    branch = chain(range(20))
    terms = torch.zeros(20, 8).t()
    from_zero = reveal(TensorTarget("from zero", terms, lambda: add_by(branch, list(terms.t())) + 0.0))
    plain = reveal(target_of(branch, 20))
    assert from_zero.order_digest == plain.order_digest
    assert from_zero != plain


def exact(parts):
    return torch.tensor([math.fsum(column) for column in torch.stack(parts).double().t().tolist()]).float()


def aligned(parts):
    """Operands cut to the largest exponent's grid, as tensor cores do, then added exactly."""
    stacked = torch.stack([p.double() for p in parts])
    top = stacked.abs().amax(0).clamp_min(1e-300)
    unit = torch.exp2(torch.floor(torch.log2(top)) - 23)
    return ((stacked / unit).trunc() * unit).sum(0).float()


@pytest.mark.parametrize("fuse", [exact, aligned])
@pytest.mark.parametrize("arity", [3, 4, 16])
def test_fused_additions_are_recognised(fuse, arity):
    """A chain of blocks, each block one fused addition with the accumulator."""
    n = 4 * arity
    terms = torch.zeros(n, 64).t()

    def run():
        columns = list(terms.t())
        total = fuse(columns[:arity])
        for at in range(arity, n, arity):
            total = fuse([total, *columns[at : at + arity]])
        return total

    branch = tuple(range(arity))
    for at in range(arity, n, arity):
        branch = (branch, *range(at, at + arity))
    tree = reveal(TensorTarget("fused", terms, run), arithmetic=False)
    assert tree.order_digest == digest(branch)


def test_a_correctly_rounded_sum_is_one_fused_addition():
    n = 50
    terms = torch.zeros(n, 8).t()
    tree = reveal(TensorTarget("exact", terms, lambda: exact(list(terms.t()))), arithmetic=False)
    assert tree.branch == tuple(range(n))
    assert str(tree) == "50 fused"


# ---- refusals -----------------------------------------------------------------------------------------------


def test_compensated_sums_are_not_plain_trees():
    with pytest.raises(RevealError, match="not a plain tree"):
        reveal(plant_compensated(40))


@pytest.mark.parametrize("function", [torch.amax, torch.prod, lambda x: x[0], lambda x: (x * x).sum()])
def test_what_is_no_sum_is_refused(function):
    with pytest.raises(RevealError):
        isobit.reveal(function, 20)


def test_what_is_not_repeatable_is_refused():
    def shuffled(x):
        return x[torch.randperm(len(x))].cumsum(0)[-1]

    with pytest.raises(RevealError):
        isobit.reveal(shuffled, 300)
    calls = iter(range(10**6))
    with pytest.raises(RevealError, match="not repeatable"):
        isobit.reveal(lambda x: x.sum() + (next(calls) % 2), 30)


def test_a_branch_on_the_data_fails_the_replay():
    def treacherous(x):
        probing = bool((x.abs() > 2.0**50).any())
        return add_by(chain(range(len(x))) if probing else pairs(range(len(x))), list(x))

    with pytest.raises(RevealError, match="not a plain tree"):
        isobit.reveal(treacherous, 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_results_that_are_no_numbers_are_refused(bad):
    with pytest.raises(RevealError):
        isobit.reveal(lambda x: x.sum() * bad, 16)


def test_arguments_are_checked():
    with pytest.raises(isobit.ArgumentError, match="number of terms"):
        isobit.reveal(torch.sum)
    with pytest.raises(isobit.ArgumentError, match="leave n out"):
        isobit.reveal(targets.sum(16), 17)
    with pytest.raises(isobit.ArgumentError, match="callable"):
        isobit.reveal(3, 4)
    with pytest.raises(isobit.ArgumentError, match="fp32, bf16 or fp16"):
        isobit.reveal(torch.sum, 4, dtype=torch.float64)


# ---- terms that cannot be negative --------------------------------------------------------------------------


def positive_target(branch, n, places=8):
    terms = torch.zeros(n, places).t()
    columns = list(terms.t())
    run = lambda: add_by(branch, [c * c for c in columns]).sqrt()  # noqa: E731
    return TensorTarget("squares", terms, run, "positive", encode=math.sqrt)


@pytest.mark.parametrize("name", ORDERS)
def test_positive_sums_come_back(name):
    branch = ORDERS[name](120)
    assert reveal(positive_target(branch, 120)).order_digest == digest(branch)


@settings(max_examples=40)
@given(n=st.integers(1, 60), seed=st.integers(0, 10**6))
def test_any_positive_tree_comes_back(n, seed):
    branch = random_branch(n, seed)
    assert reveal(positive_target(branch, n)).order_digest == digest(branch)


def test_a_fused_positive_sum_is_refused():
    terms = torch.zeros(20, 4).t()
    with pytest.raises(RevealError, match="tree of additions"):
        reveal(TensorTarget("fused", terms, lambda: exact(list(terms.t())), "positive"))


def test_a_hidden_sum_is_refused():
    terms = torch.zeros(20, 4).t()
    with pytest.raises(RevealError, match="hides its order"):
        reveal(TensorTarget("hidden", terms, lambda: terms.sum(1).clamp(max=1.0), "positive"))


# ---- speed --------------------------------------------------------------------------------------------------


def test_linear_at_4096_takes_under_five_seconds():
    start = time.perf_counter()
    tree = reveal(targets.linear(4096, 16))
    assert tree.replayed
    assert time.perf_counter() - start < 5


@pytest.mark.full
@pytest.mark.parametrize("target", [targets.sum, targets.log_softmax])
def test_a_vocabulary_sum_takes_under_a_minute(target):
    start = time.perf_counter()
    tree = reveal(target(151_936, 2))
    assert tree.n == 151_936
    assert time.perf_counter() - start < 60


def test_planted_trees_in_plain_python_come_back():
    for seed in range(5):
        branch = random_branch(33, seed)
        assert reveal(plant_tree(branch, 33)).order_digest == digest(branch)
