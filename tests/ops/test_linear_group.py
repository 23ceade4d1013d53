"""Linears that share an input: outputs are isobit.linear's, and dX is one sum over all weights, group by group."""

import pytest
import torch
from torch import Tensor

from isobit import ArgumentError, UnsupportedError, bits
from isobit.ops.linear.group import interleave, linear_group
from isobit.ops.linear.op import linear
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
            rows, [weights[0].requires_grad_()], samples=Samples.packed([6], first=0, total=2)
        )
