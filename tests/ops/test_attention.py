"""Theorem: attention's bits depend on a query, its position and its sample's keys alone.

1. Decode, chunks and prefill are one fold; packing, padding, pages, forks, storage and threads do not matter.
2. The native kernels equal the portable definition, forward and backward; and fp64 within stock's error.
"""

from functools import partial

import pytest
import torch

import isobit
from isobit import bits
from isobit.machine import thread_count
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
@pytest.mark.parametrize("window", [None, 40])
def test_decode_and_chunks_are_prefill(dtype, window):
    q, k, v = problem(150, dtype=dtype)
    whole = isobit.attention(q, k, v, is_causal=True, window=window)
    for t in range(150):
        one = isobit.attention(
            q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], is_causal=True, window=window
        )
        assert bits.equal(one, whole[:, t : t + 1]), t
    for size in (7, 64, 100):
        parts = [
            isobit.attention(
                q[:, t : t + size],
                k[:, : t + size],
                v[:, : t + size],
                is_causal=True,
                window=window,
            )
            for t in range(0, 150, size)
        ]
        assert bits.equal(torch.cat(parts, 1), whole), size


def test_stock_decode_is_not_prefill():
    q, k, v = (t.transpose(1, 2) for t in problem(150))
    attend = torch.nn.functional.scaled_dot_product_attention
    whole = attend(q, k, v, is_causal=True, enable_gqa=True)
    rows = [
        attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], enable_gqa=True)
        for t in range(150)
    ]
    assert not bits.equal(torch.cat(rows, 2), whole)


LENGTHS = (11, 16, 13, 19, 64, 65, 130)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_padded_and_alone(dtype, causal):
    parts = [problem(n, dtype=dtype, seed=10 * i) for i, n in enumerate(LENGTHS)]
    alone = [isobit.attention(*p, is_causal=causal)[0] for p in parts]
    packed = [torch.cat([p[i][0] for p in parts]) for i in range(3)]
    samples = isobit.Samples.packed(LENGTHS)
    found = isobit.attention(*packed, is_causal=causal, q_samples=samples, k_samples=samples)
    assert bits.equal(found, torch.cat(alone))
    for side in ("left", "right"):
        width = 140
        rows = [draw(len(parts), width, *p.shape[1:], dtype=dtype, seed=99) for p in packed]
        spans = isobit.Samples.padded(LENGTHS, width=width, side=side)
        for i, n in enumerate(LENGTHS):
            at = slice(width - n, width) if side == "left" else slice(0, n)
            for room, part in zip(rows, parts[i], strict=True):
                room[i, at] = part[0]
        found = isobit.attention(*rows, is_causal=causal, q_samples=spans, k_samples=spans)
        for i, (start, n) in enumerate(spans.spans):
            assert bits.equal(found.flatten(0, 1)[start : start + n], alone[i])
            room = slice(0, width - n) if side == "left" else slice(n, width)
            assert not found[i, room].any()  # padding gives zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_do_not_depend_on_packing_storage_or_threads(dtype):
    parts = [problem(n, dtype=dtype, seed=10 * i) for i, n in enumerate(LENGTHS)]
    grads = [draw(1, n, 4, 64, dtype=dtype, seed=500 + n) for n in LENGTHS]

    def backward(tensors, grad, **samples):
        tensors = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(
            isobit.attention(*tensors, is_causal=True, **samples), tensors, grad
        )

    alone = [backward(p, g) for p, g in zip(parts, grads, strict=True)]
    packed = [torch.cat([p[i][0] for p in parts]) for i in range(3)]
    samples = isobit.Samples.packed(LENGTHS)
    for threads in (1, 2):
        for store in (lambda t: t, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)):
            with thread_count(threads):
                grad = store(torch.cat([g[0] for g in grads]))
                found = backward(
                    [store(t) for t in packed], grad, q_samples=samples, k_samples=samples
                )
            for i in range(3):
                assert bits.equal(found[i], torch.cat([a[i][0] for a in alone]))


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


def test_what_is_not_seen_cannot_spoil():
    """An infinity or a NaN in a later value reaches no query before it."""
    for dtype in DTYPES:
        q, k, v = problem(70, dtype=dtype)
        clean = isobit.attention(q, k, v, is_causal=True)
        for at, value in ((30, torch.inf), (69, torch.nan)):
            spoilt = v.clone()
            spoilt[:, at] = value
            found = isobit.attention(q, k, spoilt, is_causal=True)
            assert bits.equal(found[:, :at], clean[:, :at])
            assert not found[:, at:].isfinite().all()


def test_pages_forks_and_cuts_change_no_bit():
    for dtype in DTYPES:
        q, k, v = (t[0] for t in problem(200, dtype=dtype))
        whole = isobit.attention(q, k, v, is_causal=True)
        cache = isobit.KVCache(2, 64, dtype, pages=1)
        main = cache.start()
        cache.append(main, k[:100], v[:100])
        fork = cache.fork(main)
        cache.append(fork, v[:50], k[:50])  # another future, written beside
        cache.append(main, k[100:130], v[100:130])
        cache.truncate(main, 90)
        for t in range(90, 200):
            cache.append(main, k[t : t + 1], v[t : t + 1])
            assert bits.equal(cache.attend(q[t : t + 1], [main]), whole[t : t + 1])
        assert bits.equal(cache.attend(q[150:], [main], [50]), whole[150:])
        both = cache.attend(torch.cat([q[99:100], q[190:]]), [fork, main], [1, 10])
        assert bits.equal(both[1:], whole[190:])
        other = isobit.attention(
            q[99:100], torch.cat([k[:100], v[:50]]), torch.cat([v[:100], k[:50]]), is_causal=True
        )
        assert bits.equal(both[:1], other)
        cache.truncate(fork, 100)
        assert bits.equal(cache.attend(q[99:100], [fork]), whole[99:100])


def test_refusals():
    q, k, v = problem(8)
    for call in (
        lambda: isobit.attention(q, k, v[:, :4], is_causal=True),
        lambda: isobit.attention(q[..., :60], k[..., :60], v[..., :60], is_causal=True),
        lambda: isobit.attention(q, k[:, :4], v[:, :4], is_causal=True),
        lambda: isobit.attention(q, k, v, is_causal=True, window=0),
        lambda: isobit.attention(q, k, v, is_causal=False, window=3),
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
