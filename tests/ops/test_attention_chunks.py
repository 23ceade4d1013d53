"""Theorem: chunks of 2048 keys can be computed apart from each other, skipped if unseen, and merged left to right.

1. Computing chunks apart and merging them has the bits of the whole, as a GPU that splits the keys would do it.
2. A chunk of which a query sees no key changes nothing, whether it is computed or skipped, and whatever it holds.
3. Decoding, pieces of a prompt, a prefill, packing, padding and pages of a cache are one fold beyond 2048 keys too.
4. Up to 2048 keys there is one chunk and no merge.
"""

import itertools

import pytest
import torch

import isobit
from isobit import bits
from isobit.ops import dispatch
from isobit.ops.attention import portable
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG = 2 * ATTENTION_CHUNK + 4


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(queries, keys, dtype=torch.float32, heads=1):
    shapes = ((queries, heads, 16), (keys, 1, 16), (keys, 1, 16))
    return tuple(draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def definition(q, k, v, window=0):
    spans, lengths = torch.tensor([[0, len(q)]]), torch.tensor([len(k)])
    starts = torch.tensor([list(range(0, len(k), ATTENTION_BLOCK))])
    return portable.attention(q, k, v, spans, starts, lengths, portable.Mask(0.25, True, window))


@pytest.mark.parametrize("window", [0, 130])
def test_chunks_computed_apart_are_the_whole(window):
    q, k, v = problem(3, LONG)
    k[: LONG - ATTENTION_CHUNK // 2] *= 0.5  # the largest score is in the last chunks
    mask, positions = portable.Mask(0.25, True, window), torch.arange(LONG - 3, LONG)
    chunks = [
        range(at, min(at + ATTENTION_CHUNK, LONG), ATTENTION_BLOCK)
        for at in range(0, LONG, ATTENTION_CHUNK)
    ]
    # Workers may finish in any order. Folding a chunk alone begins no second chunk.
    states = {}
    for blocks in reversed(chunks):
        one = portable.Fold(q[:, 0], positions, LONG, mask)
        one.begins_chunk = lambda first: False
        for at in blocks:
            one.add(at, k[at : at + ATTENTION_BLOCK, 0], v[at : at + ATTENTION_BLOCK, 0])
        states[blocks.start] = one.state
    total = states[0]
    for at in sorted(states)[1:]:
        total = total.merged(states[at])
    y, lse = total.finish()
    known, known_lse = definition(q, k, v, window)
    assert len(states) == 3
    assert bits.equal(y, known[:, 0])
    assert bits.equal(lse, known_lse[:, 0])
    assert bits.equal(isobit.attention(q, k, v, is_causal=True, window=window or None)[:, 0], y)
    # The merge is not associative: merged from the right, the bits are others.
    if not window:
        other = states[0].merged(states[ATTENTION_CHUNK].merged(states[2 * ATTENTION_CHUNK]))
        assert not bits.equal(other.finish()[0], y)


SCORES = (-torch.inf, -200.0, 0.0, 88.0, torch.inf, torch.nan)
VALUES = (0.0, -0.0, 1.0, -3.5, 2.0**-149, 2.0**127, torch.inf, -torch.inf, torch.nan)


def with_one_nan(t):
    """Give every NaN the same bits, as the last rounding does."""
    return torch.where(t.isnan(), torch.nan, t)


@pytest.mark.parametrize("scores", list(itertools.product(SCORES, SCORES)))
def test_a_chunk_without_a_visible_key_changes_nothing(scores):
    """Two keys of any scores and values, merged with the state of no keys on either side."""
    q, k, v = torch.zeros(1, 16), torch.zeros(2, 16), torch.ones(2, 16)
    q[0, 0], k[:, 0], v[0, : len(VALUES)] = 1, torch.tensor(scores), torch.tensor(VALUES)
    fold = portable.Fold(q, torch.tensor([1]), 2, portable.Mask(1.0, True, 0))
    fold.add(0, k, v)
    state, none = fold.state, portable.State.empty(q)
    known = [with_one_nan(t) for t in state.finish()]
    for other in (state.merged(none), none.merged(state), none.merged(none).merged(state)):
        found = [with_one_nan(t) for t in other.finish()]
        assert all(map(bits.equal, found, known))


@pytest.mark.skipif(not dispatch.has_native(), reason="there are no native kernels")
def test_skipped_and_computed_chunks_are_the_same():
    """The native kernel skips chunks that the portable executor computes: one of NaN, one of infinities."""
    window = 5
    q, k, v = problem(2, LONG, heads=2)
    clean = isobit.attention(q, k, v, is_causal=True, window=window)
    seen = LONG - 2 + 1 - window
    assert ATTENTION_CHUNK < seen < 2 * ATTENTION_CHUNK
    k[:seen] = v[:seen] = torch.inf
    k[:ATTENTION_CHUNK] = v[:ATTENTION_CHUNK] = torch.nan
    assert bits.equal(isobit.attention(q, k, v, is_causal=True, window=window), clean)
    assert bits.equal(definition(q, k, v, window)[0], clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100, 2100])
@pytest.mark.sweep(3)
def test_decode_pieces_and_pages_are_a_prefill(dtype, window):
    q, k, v = problem(LONG, LONG, dtype, heads=2)
    whole = isobit.attention(q, k, v, is_causal=True, window=window)
    cache = isobit.KVCache(1, 16, dtype, pages=1)
    other, sequence = cache.start(), cache.start()
    done = 0
    for keys in (2047, 2048, 2049, 2113, LONG):
        cache.append(other, k[:40], v[:40])  # pages of the two sequences alternate
        cache.append(sequence, k[done:keys], v[done:keys])
        done = keys
        one = isobit.attention(
            q[keys - 1 : keys], k[:keys], v[:keys], is_causal=True, window=window
        )
        assert bits.equal(one, whole[keys - 1 : keys]), keys
        paged = cache.attend(q[keys - 9 : keys], [sequence], [9], window=window)
        assert bits.equal(paged, whole[keys - 9 : keys]), keys
    for size in (700, 2048, 3000):
        pieces = [
            isobit.attention(
                q[at : at + size],
                k[: at + size],
                v[: at + size],
                is_causal=True,
                window=window,
            )
            for at in range(0, LONG, size)
        ]
        assert bits.equal(torch.cat(pieces), whole), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_and_padded_long_samples_are_those_alone(dtype):
    lengths = (70, ATTENTION_CHUNK + 66)
    given = [draw(sum(lengths), 1, 16, dtype=dtype, seed=i) for i in range(4)]

    def run(tensors, **samples):
        *inputs, grad = (t.detach().requires_grad_() for t in tensors)
        y = isobit.attention(*inputs, is_causal=True, **samples)
        return [y.detach(), *torch.autograd.grad(y, inputs, grad.detach())]

    cut = zip(*(torch.split(t, lengths) for t in given), strict=True)
    alone = [torch.cat(parts) for parts in zip(*map(run, cut), strict=True)]
    for side in ("packed", "left", "right"):
        described = isobit.Samples.packed(lengths)
        if side != "packed":
            described = isobit.Samples.padded(lengths, width=lengths[1] + 9, side=side)
        taken = torch.cat([torch.arange(s, s + n) for s, n in described.spans])
        room = [draw(described.rows, 1, 16, dtype=dtype, seed=9) for _ in given]
        for t, rows in zip(room, given, strict=True):
            t[taken] = rows
        found = run(room, q_samples=described, k_samples=described)
        assert all(bits.equal(a[taken], b) for a, b in zip(found, alone, strict=True)), side


def test_one_chunk_has_no_merge(monkeypatch):
    def refuse(*_):
        raise AssertionError("merged")

    monkeypatch.setattr(portable.State, "merged", refuse)
    q, k, v = problem(1, ATTENTION_CHUNK)
    definition(q, k, v)
    with pytest.raises(AssertionError, match="merged"):
        definition(*problem(1, ATTENTION_CHUNK + 1))
