"""What additions do is seen, and what a shallow replay would let through is refused."""

import pytest
import torch

import isobit
from isobit import RevealError
from isobit.order.addition import chain, digest
from isobit.reveal.targets.tensor_target import TensorTarget
from isobit.reveal.tree import reveal
from tests.reveal.kernels import ORDERS, add_by, blocks, exact, pairs, target_of
from tests.sweeps import mostly_full


def rounded_to(dtype):
    return lambda a, b: (a + b).to(dtype).float()


@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
@pytest.mark.parametrize(
    "name",
    mostly_full(
        ["left fold", "16 stripes, pairs", "pairwise", "right fold", "random"],
        ["16 stripes, pairs", "random"],
    ),
)
@pytest.mark.sweep(2)
def test_narrow_accumulators_are_counted_by_segments(dtype, word, name):
    n = 700
    branch = ORDERS[name](n)
    bits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    terms = torch.zeros(n, 64, dtype=dtype).t()
    run = lambda: add_by(branch, list(terms.t().float()), rounded_to(dtype))  # noqa: E731
    tree = reveal(TensorTarget("narrow", terms, run, output_bits=bits))
    assert tree.order_digest == digest(branch)
    assert str(tree.arithmetic).startswith(f"{word} sums")
    assert tree.replayed >= 8


def test_a_wide_accumulator_is_seen():
    n, branch = 200, chain(range(200))
    terms = torch.zeros(n, 64).t()
    run = lambda: add_by(branch, list(terms.t().double())).float()  # noqa: E731
    tree = reveal(TensorTarget("wide", terms, run))
    assert tree.order_digest == digest(branch)
    assert "fp64 sums" in str(tree.arithmetic)
    assert tree.replayed >= 8


def test_narrowing_at_merges_is_seen():
    """Four chains in fp32, each stored as bf16, then merged: as split-K with a bf16 workspace does."""
    n = 256
    branch = blocks(n, 64, chain)
    terms = torch.zeros(n, 64).t()

    def run():
        parts = [
            add_by(chain(range(64)), list(terms.t()[at : at + 64])).bfloat16().float()
            for at in range(0, n, 64)
        ]
        return add_by(chain(range(4)), parts)

    tree = reveal(TensorTarget("split", terms, run))
    assert tree.order_digest == digest(branch)
    assert (
        str(tree.arithmetic) == "fp32 sums, 4 additions rounded to bf16, subnormals kept, -0 kept"
    )
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
    assert tree.replayed >= 8


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
    assert tree.replayed >= 8


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
    from_zero = reveal(
        TensorTarget("from zero", terms, lambda: add_by(branch, list(terms.t())) + 0.0)
    )
    plain = reveal(target_of(branch, 20))
    assert from_zero.order_digest == plain.order_digest
    assert from_zero != plain


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


# ---- what a shallow replay would let through ---------------------------------------------------------------


def fold(x, dtype=torch.float32):
    return add_by(chain(range(len(x))), list(x.to(dtype)))


def truncated(x):
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def to_nearest(x):
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def test_two_ways_to_cut_terms_are_two_arithmetics():
    kernels = {"truncated": lambda x: fold(truncated(x)), "rounded": lambda x: fold(to_nearest(x))}
    found = isobit.reveal.compare_orders(kernels.get, list(kernels), n=16)
    assert [c.tree.arithmetic.cut_how for c in found.classes] == ["truncated", "rounded"]


def test_some_terms_cut_and_some_not_is_refused():
    with pytest.raises(RevealError, match="some cut"):
        isobit.reveal.order(lambda x: fold(torch.cat([truncated(x[:1]), x[1:]])), 16)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replays_of_narrow_terms_still_round(dtype):
    """Otherwise every order would give the same bits, and a branch on the data, or a compensated sum, would pass."""

    def branches(x):
        ordinary = bool((x.abs() <= 16).all() and (x != 0).all())
        order = chain(range(len(x))) if ordinary else pairs(range(len(x)))
        return add_by(order, list(x.float())).to(dtype)

    with pytest.raises(RevealError, match="not a tree of additions"):
        isobit.reveal.order(branches, 256, dtype=dtype)

    def toward_zero(x):
        total = x[0].double()
        for value in x[1:]:
            exact = total + value.double()
            near = exact.float()
            total = torch.where(
                near.double().abs() > exact.abs(), torch.nextafter(near, near * 0), near
            ).double()
        return total.to(dtype)

    with pytest.raises(RevealError):
        isobit.reveal.order(toward_zero, 64, dtype=dtype)


def test_a_compensated_sum_in_fp64_is_refused():
    def kahan(x):
        total, error = x[0].double(), torch.zeros((), dtype=torch.float64)
        for value in x[1:]:
            corrected = value.double() - error
            grown = total + corrected
            total, error = grown, (grown - total) - corrected
        return total.float()

    with pytest.raises(RevealError):
        isobit.reveal.order(kahan, 16)


def test_places_of_narrow_terms_are_told_apart():
    n, p = 64, 64
    terms = torch.zeros(n, p, dtype=torch.bfloat16).t()
    mine, other = chain(range(n)), chain([0, 1, *range(n - 1, 1, -1)])

    def run():
        columns = list(terms.t().float())
        last = torch.arange(p) == p - 1
        return torch.where(last, add_by(mine, columns), add_by(other, columns)).bfloat16()

    tree = reveal(TensorTarget("two", terms, run, place=p - 1))
    assert tree.order_digest == digest(mine)
    assert tree.unlike == p - 1


def test_fp16_terms_in_fp64_are_refused():
    terms = torch.zeros(64, 8).half().t()
    run = lambda: add_by(chain(range(64)), list(terms.t().double())).half()  # noqa: E731
    with pytest.raises(RevealError, match="fp32 or bf16 terms"):
        reveal(TensorTarget("fp64", terms, run))


def test_subnormals_flushed_in_one_half_are_refused():
    def flush(v):
        return torch.where(v.abs() < 2.0**-126, v * 0, v)

    def half(x):
        left, right = add_by(chain(range(32)), list(x[:32])), flush(x[32])
        for value in x[33:]:
            right = flush(flush(right) + flush(value))
        return left + right

    with pytest.raises(RevealError, match="everywhere, or nowhere"):
        isobit.reveal.order(half, 64)


def test_a_wider_result_and_a_narrow_last_addition_are_told():
    tree = isobit.reveal.order(
        lambda x: fold(x), 20, dtype=torch.bfloat16
    )  # fp32 out of bf16 terms
    assert tree.replayed >= 8
    narrow = lambda x: (x[0] + x[1]).bfloat16().float() + (x[2] + x[3]).bfloat16().float()  # noqa: E731
    tree = isobit.reveal.order(narrow, 4)
    assert tree.arithmetic.widths == (8, 8, 24)
