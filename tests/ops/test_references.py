"""Theorem: every public operator computes what its reference.py defines, forward and backward.

Each folder of isobit/ops has a reference.py with the definition in fp64 and the arguments of one call, made from one
tensor. A new operator is tried here, and by tests/attacks, without an edit of this file.
"""

import pytest
import torch

from tests.attacks.operators import OPERATORS, draw, example, last, public, reference

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}
# Attention keeps the log-sum-exp for its backward in fp32, whatever the dtype.
FP32_GRADIENT = {("attention", torch.float64)}


def tolerances_of(name, dtype):
    """Of the output, and of the gradient."""
    gradient = torch.float32 if (name, dtype) in FP32_GRADIENT else dtype
    return TOLERANCE[dtype], TOLERANCE[gradient]


def run(function, arguments, x):
    y = last(function(**arguments))
    (grad,) = torch.autograd.grad(y, x, draw(*y.shape, dtype=y.dtype, seed=6))
    return y.detach(), grad


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_computes_its_reference(name, dtype):
    x = draw(6, 48, dtype=dtype, seed=5).requires_grad_()
    found, tolerances = run(public(name), example(name)(x), x), tolerances_of(name, dtype)
    y = last(reference(name)(**example(name)(x)))
    if not y.requires_grad:  # an exact sum of rational numbers
        torch.testing.assert_close(found[0].double(), y, rtol=tolerances[0], atol=0)
        return
    (grad,) = torch.autograd.grad(y, x, draw(*y.shape, dtype=found[0].dtype, seed=6).double())
    for ours, theirs, tolerance in zip(found, (y, grad), tolerances, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale
        )


def test_every_folder_has_a_reference():
    from isobit.ops import dispatch

    assert {name.split(".")[2] for name in OPERATORS.values()} == set(dispatch.OPERATORS)
