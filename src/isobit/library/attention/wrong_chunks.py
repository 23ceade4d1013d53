"""Planted wrong attentions that are right up to 2048 keys: the portable executor with other chunks or merges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.library.attention.planted import Sample, blocks_of
from isobit.library.attention.subject import attention
from isobit.ops.attention.op import default_samples
from isobit.ops.attention.portable import Fold, Mask, State
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.sums import multiply_add, round_once
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK
from isobit.order.samples import Samples

FoldMaker = Callable[[Sample, int], Callable[..., Fold]]  # of a sample and the row of its first key


def folded_by(make: FoldMaker) -> Callable[..., Tensor]:
    """Return attention that folds as `make` says samples of more than a chunk, and others as it should."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        queries: Samples = options.get("q_samples") or default_samples(q)
        keys: Samples = options.get("k_samples") or default_samples(k)
        y = attention(q, k, v, **options).clone()
        for (start, asked), (first, count) in zip(queries.spans, keys.spans, strict=True):
            if asked and count > ATTENTION_CHUNK:
                here, rows = slice(first, first + count), slice(start, start + asked)
                tensors = (q.flatten(0, -3)[rows], k.flatten(0, -3)[here], v.flatten(0, -3)[here])
                sample = Sample(*tensors, options)
                y.flatten(0, -3)[rows] = fold_sample(sample, make(sample, first))
        return y

    return call


def fold_sample(sample: Sample, fold: Callable[..., Fold]) -> Tensor:
    """Return [queries, heads, D] of one sample."""
    y, group = torch.empty_like(sample.q), sample.q.shape[1] // sample.k.shape[1]
    mask = Mask(sample.scale, sample.causal, sample.window)
    positions = torch.arange(len(sample.q)) + sample.past
    for head in range(sample.q.shape[1]):
        folded = fold(sample.q[:, head].float(), positions, len(sample.k), mask)
        for at in blocks_of(len(sample.k)):
            rows = [t[at, head // group].float() for t in (sample.k, sample.v)]
            folded.add(at.start, *rows)
        y[:, head] = round_once(folded.finish()[0], y.dtype)
    return y


class _Elsewhere(Fold):
    """Begins a chunk where `edge(first)` says."""

    def __init__(self, edge: Callable[[int], bool], *given: Any) -> None:
        super().__init__(*given)
        self._edge = edge

    def begins_chunk(self, first: int) -> bool:
        return first > 0 and self._edge(first)


class _Fused(Fold):
    """Merges with one fused multiply-add, as a compiler does that may contract."""

    def merge(self, earlier: State, chunk: State) -> State:
        most = torch.maximum(earlier.max, chunk.max)
        base = torch.where(most == -torch.inf, 0.0, most)
        left, right = exp_nonpositive(earlier.max - base), exp_nonpositive(chunk.max - base)
        total = multiply_add(earlier.sum, left, chunk.sum * right)
        return State(most, total, multiply_add(earlier.output, left, chunk.output * right))


class _Unguarded(Fold):
    """Merges two chunks without a visible key to NaN: −inf − (−inf)."""

    def merge(self, earlier: State, chunk: State) -> State:
        merged = earlier.merged(chunk)
        lost = torch.where(merged.max == -torch.inf, torch.nan, 0.0)
        return State(merged.max, merged.sum + lost, merged.output + lost)


def _elsewhere(edge: Callable[[int], bool]) -> Callable[..., Fold]:
    return lambda *given: _Elsewhere(edge, *given)


def _from_the_window(sample: Sample, row: int) -> Callable[..., Fold]:
    """Count chunks from the first block that the first query sees."""
    seen = sample.past + 1 - sample.window if sample.window else 0
    origin = max(seen, 0) // ATTENTION_BLOCK * ATTENTION_BLOCK
    return _elsewhere(lambda first: (first - origin) % ATTENTION_CHUNK == 0)


def _from_the_row(sample: Sample, row: int) -> Callable[..., Fold]:
    """Cut chunks at rows of the batch instead of positions of the sample."""
    return _elsewhere(lambda first: (row + first) % ATTENTION_CHUNK < ATTENTION_BLOCK)


no_chunks = folded_by(lambda sample, row: _elsewhere(lambda first: False))
half_chunks = folded_by(
    lambda sample, row: _elsewhere(lambda first: first % (ATTENTION_CHUNK // 2) == 0)
)
chunks_from_the_window = folded_by(_from_the_window)
row_chunks = folded_by(_from_the_row)
fused_merge = folded_by(lambda sample, row: _Fused)
empty_chunks_are_nan = folded_by(lambda sample, row: _Unguarded)
