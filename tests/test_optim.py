"""One norm however gradients are cut, and a step that is each element's own.

1. Clipping scales as torch does. grad-norm-kernel-v1 judges that the norm of pieces is the norm of the whole.
2. AdamW is torch's, to the bit; the fused form, whose tails have other bits, is refused, also from a state dict.
"""

import math

import pytest
import torch
from torch import nn

from isobit import ArgumentError, UnsupportedError, bits
from isobit.optim import AdamW, clip_grad_norm_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def with_grads(*grads):
    made = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = grad.clone()
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_torchs_within_a_rounding(dtype, limit):
    grads = [torch.randn(33, 7).to(dtype), torch.randn(5).to(dtype)]
    ours, theirs = with_grads(*grads), with_grads(*grads)
    norm = clip_grad_norm_(ours, limit)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.to(dtype), torch.nn.utils.clip_grad_norm_(theirs, limit))
    for a, b, grad in zip(ours, theirs, grads, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        assert bits.equal(a.grad, (grad.float() * scale).to(dtype))


def test_what_has_no_gradient_is_passed_over():
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    (one,) = with_grads(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(one, 1.0).item() == 5.0
    assert clip_grad_norm_((p for p in [one]), 10.0).item() == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_norms_that_are_not_finite(wrong):
    grads = with_grads(torch.tensor([1.0, wrong]))
    with pytest.raises(UnsupportedError, match="not finite"):
        clip_grad_norm_(grads, 1.0, error_if_nonfinite=True)
    assert grads[0].grad[0] == 1.0  # untouched
    assert not clip_grad_norm_(grads, 1.0).isfinite()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ArgumentError, match="strided"):
        clip_grad_norm_(table.parameters(), 1.0)


def train(kind, values, steps=4, **options):
    parameters = [nn.Parameter(v.clone()) for v in values]
    optimiser = kind(parameters, lr=1e-2, weight_decay=0.1, **options)
    for step in range(steps):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = (value * (step - 1.3)).cos()
        optimiser.step()
    return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_torchs_and_those_of_pieces(dtype, foreach):
    x = torch.randn(5003).to(dtype)
    whole = train(AdamW, [x], foreach=foreach)
    assert bits.equal(whole, train(torch.optim.AdamW, [x]))
    for pieces in (x.split(3), x.split(1000), x.tensor_split(7)):
        assert bits.equal(train(AdamW, pieces, foreach=foreach), whole)


def test_the_control_depends_on_the_pieces_and_is_refused():
    x = torch.randn(50_003)
    whole, pieces = (train(torch.optim.AdamW, parts, fused=True) for parts in ([x], x.split(3)))
    assert not bits.equal(whole, pieces)
    with pytest.raises(ArgumentError, match="fused"):
        AdamW([nn.Parameter(x)], fused=True)


def test_a_state_dict_brings_no_fused_form_back():
    x = nn.Parameter(torch.ones(3))
    x.grad = torch.ones(3)
    stock, ours = torch.optim.AdamW([x], fused=True), AdamW([x])
    stock.step()
    ours.load_state_dict(stock.state_dict())
    with pytest.raises(ArgumentError, match="fused"):
        ours.step()


def test_hooks_of_a_step_run_once():
    """Also where torch's AdamW was made before, which puts hooks around the parent's step."""
    parameter = torch.nn.Parameter(torch.ones(4))
    torch.optim.AdamW([parameter])
    optimizer, seen = AdamW([parameter]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert seen == ["before", "after"]
    assert not torch.equal(parameter, torch.ones(4))
