"""Linears that share an input: outputs are isobit.linear's, and dX is one sum over all weights, group by group."""

import pytest
import torch
from torch import Tensor

from isobit import ArgumentError, UnsupportedError, bits
from isobit.machine import thread_count
from isobit.ops.linear import partial
from isobit.ops.linear.group import interleave, linear_group
from isobit.ops.linear.op import linear
from isobit.order.cut import Cut
from isobit.order.samples import Samples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (rows of each weight, groups): queries, keys and values in groups; gate and up; a plan of one segment.
GROUPS = [
    ((256, 128, 128), 2),
    ((512, 256, 256), 8),
    ((96, 48, 48), 1),
    ((300, 300), 1),
    ((288, 96, 96), 3),
]


def problem(dims, dtype=torch.float32, shape=(2, 37), width=64):
    """(x, weights, biases, upstream gradients)."""
    generator = torch.Generator().manual_seed(sum(dims))

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    weights, biases = [draw(n, width) for n in dims], [draw(n) for n in dims]
    return draw(*shape, width), weights, biases, [draw(*shape, n) for n in dims]


def run(x, weights, biases, grads, **options):
    leaves = [t.detach().requires_grad_() for t in (x, *weights, *biases)]
    outputs = linear_group(
        leaves[0], leaves[1 : 1 + len(weights)], leaves[1 + len(weights) :], **options
    )
    return outputs, torch.autograd.grad(outputs, leaves, grads)


def by_linear(x, weight, bias, grad):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = linear(*leaves)
    return y, *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dims", "groups"), GROUPS)
def test_outputs_and_parameters_are_linears_and_dx_is_one_sum(dims, groups, dtype):
    x, weights, biases, grads = problem(dims, dtype)
    outputs, found = run(x, weights, biases, grads, groups=groups)
    for at, given in enumerate(zip(weights, biases, grads, strict=True)):
        y, _, dw, db = by_linear(x, *given)
        assert bits.equal(outputs[at], y)
        assert bits.equal(found[1 + at], dw)
        assert bits.equal(found[1 + len(dims) + at], db)
    joined, bias = interleave(weights, 0, groups), torch.zeros(sum(dims), dtype=dtype)
    assert bits.equal(found[0], by_linear(x, joined, bias, interleave(grads, -1, groups))[1])


def test_autograd_alone_would_add_dx_otherwise():
    x, weights, biases, grads = problem((256, 128, 128))
    leaf = x.detach().requires_grad_()
    outputs = [linear(leaf, w, b) for w, b in zip(weights, biases, strict=True)]
    assert not bits.equal(
        torch.autograd.grad(outputs, leaf, grads)[0], run(x, weights, biases, grads)[1][0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_hold_whole_groups_merge_to_the_whole(ranks, dtype):
    x, weights, biases, grads = problem((512, 256, 256), dtype)
    outputs, found = run(x, weights, biases, grads, groups=4)
    shares = []
    for rank in range(ranks):
        own = [w.chunk(ranks, 0)[rank] for w in weights]
        part = linear_group(x, own, [b.chunk(ranks, 0)[rank] for b in biases], groups=4 // ranks)
        for left, right in zip(part, outputs, strict=True):
            assert bits.equal(left, right.chunk(ranks, -1)[rank].contiguous())
        given = interleave([g.chunk(ranks, -1)[rank] for g in grads], -1, 4 // ranks)
        shares.append(
            partial.input_grad(given, interleave(own, 0, 4 // ranks), Cut(1024, ranks, rank))
        )
    assert bits.equal(partial.merge(shares, dtype=dtype), found[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_storage_and_threads_change_no_bit(dtype):
    x, weights, biases, grads = problem((256, 128, 128), dtype, (40,))
    outputs, found = run(x, weights, biases, grads, groups=2)
    few = run(x[:3], weights, biases, [g[:3] for g in grads], groups=2)
    assert bits.equal(few[1][0], found[0][:3])
    assert all(bits.equal(a, b[:3]) for a, b in zip(few[0], outputs, strict=True))
    stored = [w.t().contiguous().t() for w in weights]
    for threads in (1, 2):
        with thread_count(threads):
            again = run(x.t().contiguous().t(), stored, biases, grads, groups=2)
            assert all(
                bits.equal(a, b)
                for a, b in zip((*again[0], *again[1]), (*outputs, *found), strict=True)
            )


def test_parameters_are_one_sum_over_samples():
    x, weights, biases, grads = problem((64, 32), shape=(12,))
    packed = run(x, weights, biases, grads, samples=Samples.packed([5, 7]))[1]
    padded = Samples.padded([5, 7], width=9)

    def placed(t: Tensor) -> Tensor:
        room = torch.full((18, t.shape[1]), 3.0)
        room[:5], room[9:16] = t[:5], t[5:]
        return room

    found = run(placed(x), weights, biases, [placed(g) for g in grads], samples=padded)[1]
    assert all(bits.equal(a, b) for a, b in zip(found[1:], packed[1:], strict=True))


def test_gradcheck_in_fp64():
    x, weights, biases, _ = problem((6, 3), torch.float64, (4,), 5)
    leaves = [t.requires_grad_() for t in (x, *weights, *biases)]
    assert torch.autograd.gradcheck(
        lambda x, a, b, c, d: linear_group(x, [a, b], [c, d], groups=3), leaves
    )


def test_without_biases_and_with_some():
    x, weights, biases, grads = problem((64, 32))
    for given in (None, [None, None], [biases[0], None]):
        found = linear_group(x, weights, given)
        for y, w, b in zip(found, weights, given or (None, None), strict=True):
            assert bits.equal(y, linear(x, w, b))
    leaf = x.detach().requires_grad_()
    found = torch.autograd.grad(linear_group(leaf, weights), leaf, grads)[0]
    assert bits.equal(found, run(x, weights, biases, grads)[1][0])  # a bias has no part in dX


REFUSED = {
    "no weights": lambda x, w: linear_group(x, []),
    "fewer biases": lambda x, w: linear_group(x, [w, w], [None]),
    "groups": lambda x, w: linear_group(x, [w], groups=3),
    "no groups": lambda x, w: linear_group(x, [w], groups=0),
    "widths": lambda x, w: linear_group(x, [w, w[:, 1:]]),
    "dtypes": lambda x, w: linear_group(x, [w, w.bfloat16()]),
    "samples": lambda x, w: linear_group(x, [w], samples=Samples.packed([9])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_offer_a_remedy(case):
    with pytest.raises(
        ArgumentError, match=r"(?s)isobit\.\w+: expected .*\n  received: .*\n  remedy: "
    ):
        REFUSED[case](torch.randn(2, 8), torch.randn(4, 8))


def test_second_order_and_shares_are_refused():
    x, weights, _, _ = problem((8, 4))
    leaf = x.requires_grad_()
    with pytest.raises(UnsupportedError, match="first-order"):
        torch.autograd.grad(linear_group(leaf, weights)[0].square().sum(), leaf, create_graph=True)
    rows = x.detach().reshape(-1, 64)[:6]
    with pytest.raises(UnsupportedError, match="global batch"):
        linear_group(
            rows, [weights[0].requires_grad_()], samples=Samples.packed([6], first=0, of=2)
        )
