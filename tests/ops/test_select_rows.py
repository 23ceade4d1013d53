"""select_rows copies: rows forward, gradients backward, whatever else is in the tensor.

select-rows-v1 judges the bits in every placement; here are shapes, errors and what autograd sees.
"""

import pytest
import torch

import isobit
from isobit import ArgumentError, UnsupportedError, bits
from isobit.integrations.transformers.strictness import walk_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_and_gradients_are_copies(dtype):
    x = torch.randn(2, 5, 7).to(dtype).requires_grad_()
    rows = torch.tensor([9, 0, 4], dtype=torch.int32)
    y = isobit.select_rows(x, rows)
    assert bits.equal(y.detach(), x.detach().reshape(10, 7)[[9, 0, 4]])
    grad = torch.randn(3, 7).to(dtype)
    grad[1] = -0.0
    y.backward(grad)
    expected = torch.zeros(10, 7, dtype=dtype)
    expected[[9, 0, 4]] = grad
    assert bits.equal(x.grad, expected.reshape(2, 5, 7))
    assert bool(x.grad[0, 0].signbit().all())  # indexing of torch adds −0 to +0


def test_autograd_sees_no_sum_where_indexing_has_one():
    x = torch.randn(2, 5, 7, requires_grad=True)
    assert walk_gradients(isobit.select_rows(x, torch.tensor([3]))) == []
    assert walk_gradients(x[[0, 1], [3, 3]]) != []


def test_no_rows_views_and_compiled_calls():
    x = torch.randn(4, 6, 8)[:, ::2, 1::2].requires_grad_()
    none = isobit.select_rows(x, torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 4)
    none.sum().backward()
    assert bits.equal(isobit.select_rows(x, torch.tensor([11])).detach(), x.detach()[3, 2:3])
    given = torch.randn(4, 3), torch.tensor([2, 0])
    torch.library.opcheck(torch.ops.isobit.portable_select_rows.default, given)


def test_repeated_and_missing_rows_are_errors_that_name_them():
    x = torch.randn(2, 3, 4)
    with pytest.raises(ArgumentError, match="row 5 more than once"):
        isobit.select_rows(x, torch.tensor([5, 1, 5]))
    with pytest.raises(ArgumentError, match=r"rows from 0 to 5.*\n.*row -1"):
        isobit.select_rows(x, torch.tensor([-1]))
    with pytest.raises(ArgumentError, match="bool of shape"):
        isobit.select_rows(x, torch.ones(6, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.func.vmap(lambda x: isobit.select_rows(x, torch.tensor([0])))(x)
