"""Claims of attention-kernel-v1: decode equals prefill, samples are independent, bounds, masks, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.errors import UnsupportedError
from isobit.foundation.machine import thread_count
from isobit.library import stock
from isobit.library.attention.orders import error_bound, share_bound
from isobit.library.attention.planted import portable_attention
from isobit.library.claims import (
    Subject,
    forward_and_gradients,
    gradients,
    in_every_storage_and_thread_count,
    must_raise,
    on_one_thread,
    placements,
    put_among_random,
    rows_of,
)
from isobit.ops import dispatch
from isobit.ops.attention import portable
from isobit.ops.attention.op import mask_of
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK
from isobit.order.samples import Samples

CHUNKS, DECODED = (7, 64, 100), 100
LENGTHS, WIDTH = (11, 16, 13, 66, 19), 70
DEPTH = 16
NARROW = 2.0**-8 + 2.0**-16  # a weight and an output rounded to 8 bits


@on_one_thread
def decode_is_prefill(subject: Subject, case: Case, tally: Tally) -> None:
    """Queries decoded one by one, and in chunks, have the bits of a prefill."""
    q, k, v = case.arguments.values()
    with thread_count(2):
        whole = subject(q, k, v, **case.options)
    tally.count(len(q) * q.shape[1])
    for at in sorted(torch.randperm(len(q), generator=case.generator(60))[:DECODED].tolist()):
        one = subject(q[at : at + 1], k[: at + 1], v[: at + 1], **case.options)
        tally.same(one, whole[at : at + 1], f"query {at} decoded")
    for size in CHUNKS:
        ends = [(at, min(at + size, len(q))) for at in range(0, len(q), size)]
        parts = [subject(q[at:end], k[:end], v[:end], **case.options) for at, end in ends]
        tally.same(torch.cat([whole[:0], *parts]), whole, f"in chunks of {size}")


def all_four(subject: Subject, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Return y, dq, dk and dv of (q, k, v, upstream gradient)."""
    *given, grad = tensors
    y, found = forward_and_gradients(subject, given, grad, **options)
    return [y.detach(), *found]


@on_one_thread
def samples_are_alone(subject: Subject, case: Case, tally: Tally) -> None:
    """A sample's y, dq, dk and dv are the same alone, packed, padded, in any storage, on any threads."""
    heads, total = case.sizes["heads"], sum(LENGTHS)
    tensors = [case.draw((total, heads, DEPTH), 70 + i, "normal") for i in range(4)]
    tally.count(total * heads)
    cut = zip(*(torch.split(t, list(LENGTHS)) for t in tensors), strict=True)
    alone = [all_four(subject, list(parts), **case.options) for parts in cut]
    whole = [torch.cat(parts) for parts in zip(*alone, strict=True)]

    def compare(*given: Any) -> None:
        *tensors, described, where = given
        found = all_four(subject, tensors, q_samples=described, k_samples=described, **case.options)
        for name, left, right in zip(("y", "dq", "dk", "dv"), found, whole, strict=True):
            tally.same(left[rows_of(described)], right, f"{name} {where}")

    packed = Samples.packed(LENGTHS)
    for where, lying in (("packed", packed), *placements(LENGTHS, WIDTH)):
        moved = [put_among_random(case, t, lying, 80 + i) for i, t in enumerate(tensors)]
        compare(*moved, lying, where)
    in_every_storage_and_thread_count(compare, tensors, packed)


@on_one_thread
def unseen_is_nothing(subject: Subject, case: Case, tally: Tally) -> None:
    """Masked keys and values may be anything: later ones, before the window, of another sample."""
    q, k, v = case.arguments.values()
    half, window, tokens = len(q) // 2, 3, len(q)
    tally.count(tokens * q.shape[1])
    if not tokens:
        return
    known = Samples.packed([tokens, tokens])
    clean, windowed = subject(q, k, v), subject(q, k, v, window=window)
    tally.same(subject(q, k, v, window=tokens), clean, "a window of all keys")
    for value in (torch.inf, torch.nan):
        later_k, later_v, early_k, early_v = k.clone(), v.clone(), k.clone(), v.clone()
        later_k[half:] = later_v[half:] = early_k[:half] = early_v[:half] = value
        found = subject(q, later_k, later_v)[:half]
        tally.same(found, clean[:half], f"before keys that are {value}")
        first = half + window - 1
        found = subject(q, early_k, early_v, window=window)[first:]
        tally.same(found, windowed[first:], f"a window after {value}")
        # Seen from both sides, and in chunks: a window of `half`, and chunks of so many positions.
        for name, options, rows in (
            ("both sides", {"is_causal": False, "window": window}, slice(first, None)),
            ("chunks", {"chunk_size": half or 1}, slice(half, None)),
        ):
            whole, found = (subject(q, *kv, **options) for kv in ((k, v), (early_k, early_v)))
            tally.same(found[rows], whole[rows], f"{name} after {value}")
        spoilt = torch.full_like(k, value)
        both = [torch.cat([other, mine]) for other, mine in ((q, q), (spoilt, k), (spoilt, v))]
        found = subject(*both, q_samples=known, k_samples=known)[tokens:]
        tally.same(found, clean, f"next to a sample of {value}")


def slack_of(case: Case, keys: int) -> float:
    """Return the error that rounding may add, relative to the largest value."""
    return share_bound(max(keys, 1)) + (0.0 if case.dtype == torch.float32 else NARROW)


@on_one_thread
def in_the_hull(subject: Subject, case: Case, tally: Tally) -> None:
    """Each output is between the smallest and the largest value that its query sees, within rounding."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])
    if not len(q):
        return
    y, values = subject(q, k, v).double(), v.double()
    most = values.abs().cummax(0).values.amax(-1, keepdim=True) * slack_of(case, len(k))
    tally.true(y >= values.cummin(0).values - most, "below the smallest value seen", y)
    tally.true(y <= values.cummax(0).values + most, "above the largest value seen", y)


@on_one_thread
def shares_sum_to_one(subject: Subject, case: Case, tally: Tally) -> None:
    """Values of 1 give 1, within the bound of the order; one key gives its value exactly."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])
    for is_causal in (True, False):
        y = subject(q, k, torch.ones_like(v), is_causal=is_causal).double()
        limit = slack_of(case, len(k))
        tally.true((y - 1).abs() <= limit, f"|Σ shares − 1| over {limit:.3g}", y)
    alone = subject(q[:1], k[:1], v[:1])
    tally.same(alone, v[:1] + 0.0, "one key")


@on_one_thread
def within_the_bound(subject: Subject, case: Case, tally: Tally) -> None:
    """The error against fp64 is at most the bound of the order at these scores, in units of the largest value."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])
    if not len(q):
        return
    exact = stock.attention(q.double(), k.double(), v.double(), **case.options)
    sizes = torch.einsum("qhd,khd->hqk", q.double().abs(), k.double().abs())
    reach = float(sizes.amax()) * DEPTH**-0.5
    limit = error_bound(len(k), DEPTH, reach) * float(v.double().abs().amax())
    error = (subject(q, k, v, **case.options).double() - exact).abs()
    tally.true(error <= limit, f"error over {limit:.3g}", error)


@on_one_thread
def executors_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """The native and the portable executor have the same bits."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])
    found, other = (f(q, k, v, **case.options) for f in (subject, portable_attention))
    tally.same(found, other, "the other executor")


@on_one_thread
def gradients_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """y, dq, dk and dv have the bits of the portable executor."""
    q, k, v = case.arguments.values()
    grad = case.draw(tuple(q.shape), 90)
    mask = mask_of(q, **{"is_causal": True, **case.options})
    found = all_four(subject, [q, k, v, grad], **case.options)
    tally.count(len(q) * q.shape[1])
    spans, lengths = torch.tensor([[0, len(q)]]), torch.tensor([len(q)])
    blocks = torch.tensor([list(range(0, len(q), ATTENTION_BLOCK))])
    y, lse = portable.attention(q, k, v, spans, blocks, lengths, mask)
    known = [y, *portable.attention_backward(portable.Saved(grad, q, k, v, y, lse), spans, mask)]
    for name, left, right in zip(("y", "dq", "dk", "dv"), found, known, strict=True):
        tally.same(left, right, f"{name} against the other executor")


@on_one_thread
def masks_and_caps(subject: Subject, case: Case, tally: Tally) -> None:
    """y, dq, dk and dv are near stock's in fp64, and have the bits of the portable executor.

    The portable executor adds in chains, as fp32 does everywhere, and bf16 does on CPUs without AMX.
    """
    if dispatch.engine_of(case.dtype) == "chain":
        gradients_agree(subject, case, tally)
    near_stock(subject, case, tally)


@on_one_thread
def near_stock(subject: Subject, case: Case, tally: Tally) -> None:
    """y, dq, dk and dv are near stock's in fp64."""
    q, k, v = case.arguments.values()
    grad = case.draw(tuple(q.shape), 90)
    tally.count(len(q) * q.shape[1])
    found = all_four(subject, [q, k, v, grad], **case.options)
    exact = all_four(stock.attention, [t.double() for t in (q, k, v, grad)], **case.options)
    limit = 1e-5 if case.dtype == torch.float32 else 0.05
    for name, mine, known in zip(("y", "dq", "dk", "dv"), found, exact, strict=True):
        error = (mine.double() - known).abs() / known.abs().amax().clamp(min=0.1)
        tally.true(error <= limit, f"{name}: error over {limit} of the largest element", error)


@on_one_thread
def refuses_gradients_of_a_cache(subject: Subject, case: Case, tally: Tally) -> None:
    """A gradient through keys without queries raises, with a remedy: the keys' own gradient would be lost."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])

    def call() -> None:
        gradients(lambda q, k, v: subject(q[1:], k, v).sum(), (q, k, v), None)

    must_raise(call, "a gradient through a cache", tally, UnsupportedError)


# Claims of attention-kernel-v1 about samples of more keys than a chunk has.

ASKED = 2  # the queries that the slower executor answers
# Longer and shorter than a chunk; an edge falls into the windows of some queries.
WINDOWS = (ATTENTION_CHUNK + 52, 130)
# Keys at which queries are decoded: around the edge of a chunk, and in the next one.
DECODED_LENGTHS = (ATTENTION_CHUNK - 1, ATTENTION_CHUNK, ATTENTION_CHUNK + 1, ATTENTION_CHUNK + 66)
# (keys, window): a window that an edge falls into, three chunks, a window that begins in the third one.
DEFINED = (
    (ATTENTION_CHUNK + 66, WINDOWS[1]),
    (2 * ATTENTION_CHUNK + 4, None),
    (2 * ATTENTION_CHUNK + 4, 3),
)


def last(tensors: Sequence[Tensor], keys: int, asked: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last `asked` queries of the first `keys` positions, and their keys and values."""
    q, k, v = tensors
    return q[keys - asked : keys], k[:keys], v[:keys]


@on_one_thread
def long_decode_is_prefill(subject: Subject, case: Case, tally: Tally) -> None:
    """Decoded, in pieces, packed and on two threads, queries around a chunk's edge have the bits of a prefill."""
    tensors = tuple(case.arguments.values())
    tally.count(tensors[0].shape[0] * tensors[0].shape[1])
    for window in (*WINDOWS, None):
        for compare in (compare_last_queries, compare_around_the_edge):
            compare(partial(subject, window=window), tensors, tally, f"window {window}")
            if tally.differing:  # a planted kernel takes long
                return


def compare_last_queries(
    subject: Subject, tensors: Sequence[Tensor], tally: Tally, where: str
) -> None:
    """Compare the last queries: together, by themselves, and packed with other samples."""
    q, k, v = tensors
    whole = subject(*last(tensors, len(q), 70))
    for asked in (1, 7):
        found = subject(*last(tensors, len(q), asked))
        tally.same(found, whole[-asked:], f"the last {asked} queries, {where}")
    others = (70, len(q), 5)
    packed = subject(
        torch.cat([q[n - 1 : n] for n in others]),
        *(torch.cat([t[:n] for n in others]) for t in (k, v)),
        q_samples=Samples.packed([1] * len(others)),
        k_samples=Samples.packed(others),
    )
    tally.same(packed[1:2], whole[-1:], f"packed after {others[0]} other keys, {where}")


def compare_around_the_edge(
    subject: Subject, tensors: Sequence[Tensor], tally: Tally, where: str
) -> None:
    """Compare queries around the edge of a chunk: decoded, and in one piece, which runs on two threads."""
    end, size = DECODED_LENGTHS[-1], 130
    with thread_count(2):
        piece = subject(*last(tensors, end, size))
    for keys in DECODED_LENGTHS:
        at = size - (end - keys) - 1
        found = subject(*last(tensors, keys, 1))
        tally.same(found, piece[at : at + 1], f"query {keys - 1} decoded, {where}")


@on_one_thread
def long_executors_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """The last queries over more keys than a chunk has are those of the portable executor."""
    tensors = tuple(case.arguments.values())
    tally.count(len(DEFINED) * ASKED)
    for keys, window in DEFINED:
        given = last(tensors, keys, ASKED)
        known = portable_attention(*given, window=window)
        tally.same(subject(*given, window=window), known, f"{keys} keys, window {window}")
        if tally.differing:  # the portable executor takes long
            return


@on_one_thread
def unseen_chunks_are_nothing(subject: Subject, case: Case, tally: Tally) -> None:
    """Chunks that a query does not see may hold anything: before its window, and after its position."""
    q, k, v = tensors = tuple(case.arguments.values())
    tally.count(len(q) * q.shape[1])
    edges = (ATTENTION_CHUNK, 2 * ATTENTION_CHUNK)
    for value in (torch.inf, torch.nan):
        for edge in edges:
            # A query of the next chunk that sees back to the edge, and no further; and one just before the edge.
            early = [t.clone() for t in (k, v)]
            for t in early:
                t[:edge] = value
            for end, window in ((edge + 3, 3), (edge + 1, 1)):
                clean = subject(*last(tensors, end, 1), window=window)
                found = subject(*last((q, *early), end, 1), window=window)
                tally.same(found, clean, f"a window from key {edge} on, after {value}")
            late = [t.clone() for t in (k, v)]
            for t in late:
                t[edge:] = value
            # The piece goes on after the edge, so that its tile visits the chunk with such keys.
            clean = subject(*last(tensors, edge + 3, 9))[:6]
            found = subject(*last((q, *late), edge + 3, 9))[:6]
            tally.same(found, clean, f"before keys from {edge} on that are {value}")
