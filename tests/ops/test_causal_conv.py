"""A causal convolution reads the rows of its own sample, in one order, wherever they are.

causal-conv-v1 judges the bits against wrong subjects; here are cuts, gradients and errors.
"""

import pytest
import torch

import isobit
from isobit import ArgumentError, Samples, UnsupportedError, bits

CHANNELS, TAPS = 20, 4


def given(dtype=torch.float32, tokens=30):
    drawn = torch.Generator().manual_seed(0)
    shapes = (1, tokens, CHANNELS), (CHANNELS, 1, TAPS)
    return [torch.randn(*shape, generator=drawn).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [[1] * 30, [2, 7, 21], [29, 1]], ids=str)
def test_every_cut_of_a_sample_has_one_bit_pattern(cut, dtype):
    x, weight = given(dtype)
    whole, parts, at = isobit.causal_conv(x, weight), [], 0
    before = torch.zeros(1, TAPS - 1, CHANNELS, dtype=dtype)
    for count in cut:
        here = x[:, at : at + count]
        parts.append(isobit.causal_conv(here, weight, before=before))
        before = torch.cat((before, here), 1)[:, 1 - TAPS :]
        at += count
    assert bits.equal(torch.cat(parts, 1), whole)


def test_it_is_stocks_convolution_and_packed_samples_do_not_leak():
    x, weight = given()
    stock = torch.nn.functional.conv1d(x.mT, weight, padding=TAPS - 1, groups=CHANNELS)
    torch.testing.assert_close(isobit.causal_conv(x, weight), stock[..., :30].mT)
    samples = Samples.packed([11, 2, 17])
    packed = isobit.causal_conv(x, weight, samples=samples)
    alone = [isobit.causal_conv(part, weight) for part in x.split([11, 2, 17], 1)]
    assert bits.equal(packed, torch.cat(alone, 1))
    assert not bits.equal(packed, isobit.causal_conv(x, weight))  # what a leak would look like


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_do_not_depend_on_the_layout(dtype):
    x, weight = given(dtype)
    grad = torch.randn(1, 30, CHANNELS).to(dtype)

    def gradients(rows, upstream, samples):
        leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        y = isobit.causal_conv(*leaves, samples=samples)
        return torch.autograd.grad(y, leaves, upstream)

    packed = gradients(x, grad, Samples.packed([11, 2, 17]))
    room = torch.full((3, 20, CHANNELS), torch.nan, dtype=dtype)
    above, spans = torch.zeros_like(room), []
    for row, (part, up) in enumerate(
        zip(x.split([11, 2, 17], 1), grad.split([11, 2, 17], 1), strict=True)
    ):
        count = part.shape[1]
        room[row, 20 - count :], above[row, 20 - count :] = part[0], up[0]
        spans.append((row * 20 + 20 - count, count))
    padded = gradients(room, above, Samples(tuple(spans), 60, 0, 3))
    assert bits.equal(packed[1], padded[1])
    rows = [padded[0].reshape(60, -1)[start : start + count] for start, count in spans]
    assert bits.equal(packed[0][0], torch.cat(rows))


def test_gradients_are_those_of_stock():
    x, weight = given(torch.float64)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    stock = torch.nn.functional.conv1d(x.mT, weight, padding=TAPS - 1, groups=CHANNELS)[..., :30].mT
    grad = torch.randn_like(stock)
    ours = torch.autograd.grad(isobit.causal_conv(x, weight), leaves, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(stock, leaves, grad))


def test_errors_name_what_does_not_fit():
    x, weight = given()
    with pytest.raises(ArgumentError, match=r"weight of shape \[C, 1, K\]"):
        isobit.causal_conv(x, weight[:, 0])
    with pytest.raises(ArgumentError, match="x of shape"):
        isobit.causal_conv(x[..., :3], weight)
    with pytest.raises(ArgumentError, match="before of shape"):
        isobit.causal_conv(x, weight, before=x[:, :2])
    with pytest.raises(UnsupportedError, match="need no gradient"):
        isobit.causal_conv(x, weight, before=torch.zeros(1, 3, CHANNELS, requires_grad=True))
