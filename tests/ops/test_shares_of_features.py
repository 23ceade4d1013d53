"""Tensor-parallel shares: groups of linears, heads of a norm and rows of a table, merged, are the whole bit for bit."""

import pytest
import torch
from torch import Tensor

from isobit import ArgumentError, CutError, bits
from isobit.ops import dispatch
from isobit.ops.attesting import wide_values
from isobit.ops.embedding import partial as table
from isobit.ops.embedding.op import embedding
from isobit.ops.linear import partial
from isobit.ops.linear.group import linear_group
from isobit.ops.portable.sums import round_once
from isobit.ops.rms_norm import partial as heads_of
from isobit.ops.rms_norm import portable
from isobit.ops.rms_norm.op import rms_norm
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.order.tree import merge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXECUTORS = ["native", "portable"] if dispatch.has_native() else ["portable"]


@pytest.fixture(params=EXECUTORS)
def executor(request, monkeypatch) -> str:
    if request.param == "portable":
        monkeypatch.setattr(dispatch, "is_native", lambda _: False)
    return request.param


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return wide_values(shape, dtype, torch.Generator().manual_seed(seed))


# ---- linears that share an input -------------------------------------------------------------------------


# (rows of a group of each weight, groups): segments inside one part; segments that cross parts; long segments.
GROUPS = [((512, 512), 4), ((512, 256, 256), 4), ((96, 80, 80), 4), ((1001, 40, 40), 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "groups"), GROUPS)
@pytest.mark.sweep(8)
def test_groups_merge_to_the_whole(rows, groups, dtype, executor):
    if executor == "portable" and sum(rows) > 256:
        pytest.skip("slow, and the same functions")
    weights = [drawn((groups * n, 3), 5 + at, dtype) for at, n in enumerate(rows)]
    x = drawn((8, 3), 1, dtype).requires_grad_()
    outputs = linear_group(x, weights, groups=groups)
    grads = [drawn((8, groups * n), 9 + at, dtype) for at, n in enumerate(rows)]
    (whole,) = torch.autograd.grad(outputs, x, grads)
    extent = groups * sum(rows)
    for parts in (1, 2, 4):
        if groups % parts:
            continue
        shares = []
        for index in range(parts):
            mine = [
                slice(index * groups // parts * n, (index + 1) * groups // parts * n) for n in rows
            ]
            own = [g[:, rows_] for g, rows_ in zip(grads, mine, strict=True)]
            some = [w[rows_] for w, rows_ in zip(weights, mine, strict=True)]
            shares.append(
                partial.group_input_grad(own, some, groups // parts, Cut(extent, parts, index))
            )
            assert shares[-1].values.dtype == torch.float32
            assert len(shares[-1].nodes) == 1
        assert bits.equal(partial.merge(shares, dtype=dtype), whole)
    if len(shares) > 1:
        wrong = partial.input_grad(
            torch.cat(grads, -1), torch.cat(weights), Cut(extent, 1, 0)
        )  # not by groups
        assert not bits.equal(wrong.values[0], partial.merge(shares, dtype=torch.float32))


def test_groups_that_are_no_share_are_refused():
    grad, weight = torch.ones(2, 512), torch.ones(512, 3)
    with pytest.raises(CutError, match="512 rows of weights"):
        partial.group_input_grad([grad, grad], [weight, weight], 1, Cut(1024, 2, 0))
    with pytest.raises(ArgumentError, match="divides the rows"):
        partial.group_input_grad([grad], [weight], 3, Cut(1024, 2, 0))
    with pytest.raises(ArgumentError, match="own gradient"):
        partial.group_input_grad([grad[:, :3]], [weight], 1, Cut(1024, 2, 0))


# ---- heads of a norm -------------------------------------------------------------------------------------


# (heads, ranks): one head a rank; several; three in a segment; more heads than segments.
@pytest.mark.parametrize(("heads", "ranks"), [(4, 4), (8, 2), (12, 2), (32, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_merge_to_the_whole(heads, ranks, dtype, executor):
    lengths = (3, 0, 260, 1) if executor == "native" else (3, 0, 9, 1)
    samples = Samples.padded(lengths, width=max(lengths), side="left")
    x, grad = (drawn((samples.rows, heads, 37), seed, dtype) for seed in (1, 2))
    weight = drawn((37,), 3, dtype)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = rms_norm(*leaves, 1e-6, samples=samples, heads=True)
    dx, dweight = torch.autograd.grad(y, leaves, grad)
    scales, each = portable.rms_norm(x, weight, 1e-6)[1], heads // ranks
    totals = []
    for first in range(0, heads, each):
        own = slice(first, first + each)
        given = grad[:, own], x[:, own], weight, scales[:, own]
        some, total = heads_of.sample_grads(*given, samples, heads_total=heads, first_head=first)
        assert bits.equal(some, dx[:, own])
        assert total.shape == (4, 37)
        assert total.dtype == torch.float32
        totals.append(total)
    merged = heads_of.merge_samples(merge(totals, torch.add), 4)
    assert bits.equal(round_once(merged, dtype), dweight)
    if ranks > 2:
        wrong = heads_of.merge_samples(sum(totals[::-1]), 4)  # another order of the ranks
        assert not bits.equal(wrong, merged)
    # Samples first, then ranks: each rank's own gradient, summed.
    late = merge([heads_of.merge_samples(total, 4) for total in totals], torch.add)
    assert not bits.equal(late, merged)


def test_samples_of_heads_are_shares_too(executor):
    """Twelve samples are segments of three; a share of six is one subtree of two."""
    totals = drawn((12, 40), 1, torch.float32)
    whole = heads_of.merge_samples(totals, 12)
    halves = [heads_of.merge_samples(totals[at : at + 6], 12) for at in (0, 6)]
    assert bits.equal(halves[0] + halves[1], whole)
    assert not bits.equal(
        heads_of.merge_samples(totals[:4], 4), heads_of.merge_samples(totals[:4], 4096)
    )


def test_heads_that_are_no_subtree_are_refused():
    samples, x, weight = Samples.packed([2]), torch.ones(2, 2, 3), torch.ones(3)
    for total, first in ((12, 0), (8, 1), (8, 7), (3, 0)):
        with pytest.raises(CutError, match="one subtree"):
            heads_of.sample_grads(
                x, x, weight, torch.ones(2, 2), samples, heads_total=total, first_head=first
            )
    with pytest.raises(CutError, match="one subtree"):
        heads_of.merge_samples(torch.ones(3, 2), 8)


# ---- rows of a table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_table_merge_to_the_whole(dtype, executor):
    generator, samples = torch.Generator().manual_seed(1), Samples.packed((9, 0, 20, 30))
    ids = torch.randint(0, 12, (samples.rows,), generator=generator)
    weight, grad = drawn((12, 6), 2, dtype), drawn((samples.rows, 6), 3, dtype)
    weight[4, 2] = -0.0
    word = torch.int32 if dtype == torch.float32 else torch.int16
    leaf = weight.clone().requires_grad_()
    y = embedding(ids, leaf, samples=samples, padding_idx=5)
    (whole,) = torch.autograd.grad(y, leaf, grad)
    for rows in (3, 6, 12):
        words = torch.zeros(*y.shape, dtype=word)
        for first in range(0, 12, rows):
            some = table.weight_grad(grad, ids, samples, first, rows, padding_idx=5)
            assert bits.equal(some, whole[first : first + rows])
            found = table.lookup(ids, weight[first : first + rows], first)
            words += found.view(word)  # what is absent has no bit set, so that −0 is kept too
        assert bits.equal(words.view(dtype), y.detach())
    wrong = table.weight_grad(grad, ids, samples, 1, 6, padding_idx=5)
    assert not bits.equal(wrong, whole[:6])


def test_rows_of_a_table_over_a_share_of_samples(executor):
    generator, grad = torch.Generator().manual_seed(1), drawn((8, 6), 3, torch.bfloat16)
    ids = torch.randint(0, 4, (8,), generator=generator)
    halves = [
        table.weight_grad(
            grad[at : at + 4], ids[at : at + 4], Samples.packed((1, 3), first=first, total=4), 1, 2
        )
        for at, first in ((0, 0), (4, 2))
    ]
    assert {h.dtype for h in halves} == {torch.float32}
    whole = table.weight_grad(grad, ids, Samples.packed((1, 3, 1, 3)), 1, 2)
    assert bits.equal(round_once(halves[0] + halves[1], torch.bfloat16), whole)


def test_an_empty_share_of_a_table_holds_nothing(executor):
    ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    assert bits.equal(table.lookup(ids, torch.ones(0, 3), 4), torch.zeros(2, 2, 3))
    assert table.weight_grad(torch.ones(2, 2, 3), ids, Samples.packed((2, 2)), 4, 0).shape == (0, 3)
    with pytest.raises(ArgumentError, match="first_row"):
        table.lookup(ids, torch.ones(1, 3), -1)
