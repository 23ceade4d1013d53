"""Theorem: attention's bits depend on a query, its position and its sample's keys alone.

1. The native kernels equal the portable definition, forward and backward, with and without a mask.
2. Errors are within stock's at the depths that models have; fp64 passes gradcheck.

attention-kernel-v1, gqa-kernel-v1 and kv-cache-kernel-v1 judge decoding, samples, blindness and caches. They draw a
depth of 16, with a mask, and gradients in fp32 and bf16: what they do not draw is here.
"""

from functools import partial

import pytest
import torch

import isobit
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.ops import dispatch
from isobit.ops.attention import portable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(length, heads=4, key_heads=2, depth=64, dtype=torch.float32, batch=1, seed=0):
    return (
        draw(batch, length, heads, depth, dtype=dtype, seed=seed),
        draw(batch, length, key_heads, depth, dtype=dtype, seed=seed + 1),
        draw(batch, length, key_heads, depth, dtype=dtype, seed=seed + 2),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_and_padded_samples_are_those_alone(dtype, causal):
    lengths, width = (11, 65, 130), 140
    parts = [(*problem(n, dtype=dtype, seed=n), draw(1, n, 4, 64, dtype=dtype)) for n in lengths]

    def run(given, **samples):
        *tensors, grad = (t.detach().requires_grad_() for t in given)
        y = isobit.attention(*tensors, is_causal=causal, **samples)
        return [y.detach(), *torch.autograd.grad(y, tensors, grad.detach())]

    alone = [torch.cat([t[0] for t in kind]) for kind in zip(*map(run, parts), strict=True)]
    for described in (
        isobit.Samples.packed(lengths),
        isobit.Samples.padded(lengths, width=width, side="left"),
    ):
        taken = torch.cat([torch.arange(s, s + n) for s, n in described.spans])
        given = []
        for kind in zip(*parts, strict=True):
            room = draw(described.rows, *kind[0].shape[2:], dtype=dtype, seed=99)
            room[taken] = torch.cat([t[0] for t in kind])
            given.append(room)
        found = run(given, q_samples=described, k_samples=described)
        assert all(bits.equal(a[taken], b) for a, b in zip(found, alone, strict=True))
        padding = torch.ones(described.rows, dtype=torch.bool).index_fill(0, taken, False)
        assert not any(t[padding].any() for t in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_at_a_models_depth_is_prefill(dtype):
    q, k, v = (t[0] for t in problem(150, depth=128, dtype=dtype))
    whole = isobit.attention(q, k, v, is_causal=True)
    cache = isobit.KVCache(2, 128, dtype, pages=1)
    sequence = cache.start()
    for t in range(150):
        cache.append(sequence, k[t : t + 1], v[t : t + 1])
        assert bits.equal(cache.attend(q[t : t + 1], [sequence]), whole[t : t + 1]), t


@pytest.mark.skipif(not dispatch.has_native(), reason="there are no native kernels")
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 40), (False, 0)])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1)])
def test_native_equals_portable(causal, window, heads):
    q, k, v = problem(70, *heads, depth=16)
    grad = draw(*q.shape, seed=9)
    tensors = [t.requires_grad_() for t in (q, k, v)]
    y = isobit.attention(q, k, v, is_causal=causal, window=window or None)
    found = torch.autograd.grad(y, tensors, grad)
    rows, mask = [t.detach()[0] for t in tensors], portable.Mask(0.25, causal, window)
    spans, blocks, lengths = torch.tensor([[0, 70]]), torch.tensor([[0, 64]]), torch.tensor([70])
    known, lse = portable.attention(*rows, spans, blocks, lengths, mask)
    assert bits.equal(y.detach()[0], known)
    expected = portable.attention_backward(portable.Saved(grad[0], *rows, known, lse), spans, mask)
    for left, right in zip(found, expected, strict=True):
        assert bits.equal(left[0], right)


@pytest.mark.parametrize("depth", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_within_stocks(depth, dtype):
    tensors = [t.requires_grad_() for t in problem(200, depth=depth, dtype=dtype, batch=2)]
    grad = draw(2, 200, 4, depth, dtype=dtype, seed=9)

    def stock(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
            1, 2
        )

    def errors(function, exact):
        y = function(*tensors)
        found = (y, *torch.autograd.grad(y, tensors, grad))
        gaps = [a.detach().double() - b.detach() for a, b in zip(found, exact, strict=True)]
        return [float(gap.square().mean().sqrt()) for gap in gaps]

    wide = [t.detach().double().requires_grad_() for t in tensors]
    y = stock(*wide)
    exact = (y, *torch.autograd.grad(y, wide, grad.double()))
    ours, theirs = errors(partial(isobit.attention, is_causal=True), exact), errors(stock, exact)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine <= 1.25 * other + 1e-12, (ours, theirs)


def test_gradcheck():
    q, k, v = (t.double().requires_grad_() for t in problem(5, 2, 1, 16))
    assert torch.autograd.gradcheck(lambda *t: isobit.attention(*t, is_causal=True), (q, k, v))


MASKS = (
    {"is_causal": True, "softcap": 1.5},
    {"is_causal": False, "window": 9},
    {"is_causal": True, "chunk_size": 24},
    {"is_causal": True, "softcap": 20.0, "window": 70, "chunk_size": 100},
)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.sweep(2)
def test_masks_and_caps_are_differentiated(options):
    q, k, v = (t.double().requires_grad_() for t in problem(6, 1, 1, 16))
    few = {**options, "window": 3} if "window" in options else options
    few = {**few, "chunk_size": 4} if "chunk_size" in few else few
    assert torch.autograd.gradcheck(lambda *t: isobit.attention(*t, **few), (q, k, v))


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_a_sample_with_a_mask_is_the_same_packed_padded_and_in_the_cache(options):
    q, k, v = (t[0] for t in problem(130, depth=16))
    alone = isobit.attention(q, k, v, **options)
    two = torch.cat([draw(33, 4, 16), q]), *(torch.cat([draw(33, 2, 16), t]) for t in (k, v))
    samples = isobit.Samples.packed([33, 130])
    packed = isobit.attention(*two, q_samples=samples, k_samples=samples, **options)
    assert bits.equal(packed[33:], alone)
    if options["is_causal"]:
        cache = isobit.KVCache(2, 16)
        sequence = cache.start()
        cache.append(sequence, k, v)
        rest = {name: value for name, value in options.items() if name != "is_causal"}
        assert bits.equal(cache.attend(q[-3:], [sequence], [3], **rest), alone[-3:])
    # What is not seen may be anything.
    position = torch.arange(130)
    seen = torch.ones(130, dtype=torch.bool)
    if options["is_causal"]:
        seen &= position <= 60
    if window := options.get("window"):
        seen &= (position - 60).abs() < window
    if size := options.get("chunk_size"):
        seen &= position // size == 60 // size
    spoilt = [torch.where(seen[:, None, None], t, torch.nan) for t in (k, v)]
    assert bits.equal(isobit.attention(q, *spoilt, **options)[60], alone[60])
    assert not isobit.attention(q, *spoilt, **options)[-1].isfinite().any()


def test_refusals():
    q, k, v = problem(8)
    for call in (
        lambda: isobit.attention(q, k, v[:, :4], is_causal=True),
        lambda: isobit.attention(q[..., :60], k[..., :60], v[..., :60], is_causal=True),
        lambda: isobit.attention(q, k[:, :4], v[:, :4], is_causal=True),
        lambda: isobit.attention(q, k, v, is_causal=True, window=0),
        lambda: isobit.attention(q, k, v, is_causal=False, window=-3),
        lambda: isobit.attention(q, k, v, is_causal=True, softcap=0.0),
        *(
            partial(isobit.attention, q, k, v, is_causal=True, softcap=cap)
            for cap in (
                torch.nan,
                torch.inf,
                -1.0,
                1e-60,
                1e39,
            )  # the last two are 0 and inf in fp32
        ),
        lambda: isobit.attention(q, k, v, is_causal=True, chunk_size=0),
        lambda: isobit.attention(q, k, v, is_causal=False, chunk_size=3),
        lambda: isobit.attention(q, k.half(), v, is_causal=True),
        lambda: isobit.attention(q, k, v, is_causal=True, k_samples=isobit.Samples.packed([4, 4])),
        lambda: isobit.KVCache(2, 64).attend(q[0], [isobit.KVCache(2, 64).start()]),
    ):
        with pytest.raises(isobit.ArgumentError):
            call()
    q.requires_grad_()
    with pytest.raises(isobit.UnsupportedError, match="cache"):
        isobit.attention(q[:, 4:], k, v, is_causal=True).sum().backward()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cumulative_lengths_are_samples(dtype):
    lengths = [3, 70, 0, 5]
    q, k, v = (draw(78, 2, 16, seed=seed) for seed in range(3))
    edges = torch.tensor([0, 3, 73, 73, 78], dtype=dtype)
    samples = isobit.Samples.packed(lengths)
    assert bits.equal(
        isobit.attention(q, k, v, is_causal=True, q_samples=edges, k_samples=edges),
        isobit.attention(q, k, v, is_causal=True, q_samples=samples, k_samples=samples),
    )


def test_a_gradient_needs_keys_in_the_rows_of_their_queries():
    """The backward operators read keys there: elsewhere their gradients would be those of other rows."""
    q, k, v = (t[0].requires_grad_() for t in problem(12))
    before, after = (isobit.Samples(((row, 8),), 12, 0, 1) for row in (0, 2))
    apart = isobit.attention(q, k, v, is_causal=True, q_samples=after, k_samples=before)
    with pytest.raises(UnsupportedError, match="same rows as its queries"):
        apart.sum().backward()
    cache = isobit.KVCache(2, 64)
    first, second = cache.start(), cache.start()
    for sequence in (first, second):
        cache.append(sequence, k.detach(), v.detach())
    with pytest.raises(UnsupportedError, match="same rows as its queries"):
        cache.attend(q, [second], [12]).sum().backward()
    isobit.attention(q, k, v, is_causal=True, q_samples=after, k_samples=after).sum().backward()
    assert k.grad[2:10].any()
    assert not k.grad[:2].any()
