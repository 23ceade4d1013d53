"""Linear layers with merged adapters: forward of a plain layer, gradients of adapters next to it, W never written.

1. Each output has the bits of isobit.linear with the merged weight; the merged weight is the rounded exact sum.
2. dA and dB are within 1e-6 of fp64's, and have the same bits padded, packed and in 1, 2, 4 micro-batches. The
   derivative through the merged weight, which is planted, does not.
3. Wrong shapes, and a bias without a place, raise.
"""

import pytest
import torch
from torch import nn

import isobit
from isobit import ArgumentError, bits
from isobit.ops.linear.merged import (
    Adapter,
    MergedLayer,
    merge_bias,
    merge_weight,
    merged_linear_group,
)
from isobit.parallel import GlobalBatch, Gradients

K, LENGTHS = 96, (5, 9, 3, 12)


def adapter(outputs, rank=4, scale=2.0, bias=False, dtype=torch.float32):
    a, b = torch.randn(rank, K) * 0.1, torch.randn(outputs, rank) * 0.1
    own = torch.randn(outputs).to(dtype).requires_grad_() if bias else None
    return Adapter(a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), scale, own)


def layer(outputs, *adapters, dtype=torch.bfloat16, bias=False):
    weight = (torch.randn(outputs, K) * 0.05).to(dtype)
    return MergedLayer(weight, torch.randn(outputs).to(dtype) if bias else None, adapters)


def trained(layers):
    return [
        t
        for each in layers
        for one in each.adapters
        for t in (one.a, one.b, one.bias)
        if t is not None
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_that_of_plain_layers_and_gradients_are_those_of_adapters(dtype):
    torch.manual_seed(0)
    layers = [
        layer(64, adapter(64), adapter(64, 1, 0.5, bias=True), dtype=dtype, bias=True),
        layer(32, adapter(32, 64), dtype=dtype),
        layer(32, dtype=dtype),
    ]
    kept = [bits.digest(each.weight) for each in layers]
    x = torch.randn(3, 11, K).to(dtype).requires_grad_()
    outputs = merged_linear_group(x, layers, groups=2)
    given = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, given)
    wide_x = x.detach().double()
    for each, y, g in zip(layers, outputs, given, strict=True):
        weight, bias = (
            merge_weight(each.weight, each.adapters),
            merge_bias(each.bias, each.adapters),
        )
        assert bits.equal(y.detach(), isobit.linear(x.detach(), weight, bias))
        exact = each.weight.double() + sum(
            (one.scale * one.b.double() @ one.a.double() for one in each.adapters),
            torch.zeros(()),
        )
        step = exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22) + 1e-7
        assert bool(((weight.double() - exact).abs() <= step).all())
        for one in each.adapters:
            a, b = (t.detach().double().requires_grad_() for t in (one.a, one.b))
            ((wide_x @ a.T) @ b.T * one.scale).backward(g.double())
            for found, wanted in ((one.a.grad, a.grad), (one.b.grad, b.grad)):
                assert float((found - wanted).norm() / wanted.norm()) < 1e-6
            if one.bias is not None:
                torch.testing.assert_close(
                    one.bias.grad, (one.scale * g.double().sum((0, 1))).float()
                )
    assert kept == [bits.digest(each.weight) for each in layers]


class Net(nn.Module):
    """Two layers of one input, with adapters, as a model has them."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(1)
        self.layers = [
            layer(64, adapter(64), adapter(64, 3, 0.5)),
            layer(32, adapter(32, dtype=dtype)),
        ]
        self.trained = nn.ParameterList([nn.Parameter(t.detach()) for t in trained(self.layers)])

    def forward(self, x, samples):
        parts = iter(self.trained)
        layers = [
            each._replace(
                adapters=tuple(one._replace(a=next(parts), b=next(parts)) for one in each.adapters)
            )
            for each in self.layers
        ]
        return merged_linear_group(x, layers, groups=2, samples=samples)


SAMPLES = [
    torch.randn(n, K, generator=torch.Generator().manual_seed(n)).bfloat16() for n in LENGTHS
]
GIVEN = [
    torch.randn(n, 96, generator=torch.Generator().manual_seed(50 + n)).bfloat16() for n in LENGTHS
]


def gradients(dtype, form, micro_batches=1, planted=False):
    net = Net(dtype)
    batch = GlobalBatch(total=4, micro_batches=micro_batches)
    collector = Gradients(net, batch)
    for at in range(micro_batches):
        which = list(range(4))[at * batch.size : (at + 1) * batch.size]
        lengths = [LENGTHS[i] for i in which]
        with collector.micro_batch(at) as share:
            place = {"first": share.first, "total": share.total}
            if form == "packed":
                samples = isobit.Samples.packed(lengths, **place)
                x, g = torch.cat([SAMPLES[i] for i in which]), torch.cat([GIVEN[i] for i in which])
            else:
                width = max(lengths) + at
                samples = isobit.Samples.padded(lengths, width=width, side=form, **place)
                x, g = (
                    torch.ones(len(which), width, K).bfloat16(),
                    torch.zeros(len(which), width, 96).bfloat16(),
                )
                for row, i in enumerate(which):
                    rows = slice(width - LENGTHS[i], None) if form == "left" else slice(LENGTHS[i])
                    x[row, rows], g[row, rows] = SAMPLES[i], GIVEN[i]
            outputs = net(x, samples)
            torch.autograd.backward(outputs, list(g.split([64, 32], -1)))
    return [bits.digest(p.grad) for p in net.trained]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_depend_on_layout_or_micro_batches(dtype):
    expected = gradients(dtype, "packed")
    assert len(set(expected)) == len(expected)
    for form in ("left", "right", "packed"):
        for count in (1, 2, 4):
            assert gradients(dtype, form, count) == expected, (form, count)


def test_the_derivative_through_the_merged_weight_is_no_sum_over_micro_batches():
    """Planted: Bᵀ(gᵀx) of each micro-batch, added up, has other bits than that of the whole."""
    b = Net(torch.float32).layers[0].adapters[0].b.detach()
    x, g = torch.cat(SAMPLES).float(), torch.cat(GIVEN)[:, :64].float()
    whole = isobit.linear(b.t(), (g.t() @ x).t().contiguous())
    half = len(SAMPLES[0]) + len(SAMPLES[1])
    parts = [
        isobit.linear(b.t(), (g[cut].t() @ x[cut]).t().contiguous())
        for cut in (slice(half), slice(half, None))
    ]
    assert not bits.equal(whole, parts[0] + parts[1])


def test_wrong_arguments_raise():
    torch.manual_seed(0)
    x = torch.randn(2, 3, K).bfloat16()
    with pytest.raises(ArgumentError, match="lora_A"):
        merged_linear_group(x, [layer(32, Adapter(torch.ones(4, K - 1), torch.ones(32, 4), 1.0))])
    with pytest.raises(ArgumentError, match="lora_B"):
        merged_linear_group(x, [layer(32, Adapter(torch.ones(4, K), torch.ones(31, 4), 1.0))])
    with pytest.raises(ArgumentError, match=r"(?s)lora_bias.*beside"):
        merged_linear_group(x, [layer(32, adapter(32, bias=True))])


def test_autocast_merges_in_fp32_and_multiplies_in_its_dtype():
    torch.manual_seed(0)
    one = layer(32, adapter(32), dtype=torch.float32)
    x = torch.randn(2, 3, K, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (y,) = merged_linear_group(x, [one])
        expected = isobit.linear(x, merge_weight(one.weight, one.adapters))
    assert y.dtype == torch.bfloat16
    assert bits.equal(y, expected)
    assert merge_weight(one.weight, one.adapters).dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == one.adapters[0].a.grad.dtype == torch.float32
