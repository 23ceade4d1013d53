"""Claims of attention-kernel-v1 about samples of more keys than a chunk has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count
from isobit.library.attention.planted import portable_attention
from isobit.library.subjects import Subject, on_one_thread
from isobit.order.plan import ATTENTION_CHUNK
from isobit.order.samples import Samples

ASKED = 2  # the queries that the slower executor answers
# Longer and shorter than a chunk; an edge falls into the windows of some queries.
WINDOWS = (ATTENTION_CHUNK + 52, 130)
# Keys at which queries are decoded: around the edge of a chunk, and in the next one.
DECODED = (ATTENTION_CHUNK - 1, ATTENTION_CHUNK, ATTENTION_CHUNK + 1, ATTENTION_CHUNK + 66)
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
    end, size = DECODED[-1], 130
    with thread_count(2):
        piece = subject(*last(tensors, end, size))
    for keys in DECODED:
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
