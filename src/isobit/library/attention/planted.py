"""isobit.attention and the portable executor as subjects, and planted wrong attentions that have been shipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.library.claims import gradients, with_backward
from isobit.ops.attention import op, portable
from isobit.ops.attention.op import default_samples, mask_of
from isobit.ops.attention.portable import Fold, State
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.sums import multiply_add, round_once
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK
from isobit.order.samples import Samples

Parts = tuple[Tensor, Tensor]  # y and the log-sum-exp of the scores


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, **options: Any) -> Tensor:
    """Call isobit.attention, which has no default for is_causal."""
    return op.attention(q, k, v, is_causal=is_causal, **options)


class Sample:
    """One sample of a call: its rows of q, k and v, and its mask."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        """Take the rows of one sample; `options` are the keywords of the call."""
        self.q, self.k, self.v = q, k, v
        names = ("scale", "window", "softcap", "chunk_size")
        wanted = {name: options[name] for name in names if name in options}
        self.mask = mask_of(q, bool(options.get("is_causal", True)), **wanted)
        self.window = self.mask.window
        self.past = len(k) - len(q)  # keys of earlier calls

    def scores(self, keys: slice) -> Tensor:
        """Return [heads, queries, keys] in fp64; −inf where a key is masked."""
        group = self.q.shape[1] // self.k.shape[1]
        k = self.k[keys].repeat_interleave(group, 1).double()
        seen = self.mask.seen(
            torch.arange(len(self.q)) + self.past, keys.start, len(k), len(self.k)
        )
        scores, _ = self.mask.scored(torch.einsum("qhd,khd->hqk", self.q.double(), k))
        return torch.where(seen, scores, -torch.inf)

    def over(self, keys: slice) -> Parts:
        """Return y and log-sum-exp over some keys, computed in fp64, so that only the planted error is wrong."""
        group, scores = self.q.shape[1] // self.k.shape[1], self.scores(keys)
        lse = scores.logsumexp(-1)
        weights = (scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)).exp()
        y = torch.einsum("hqk,khd->qhd", weights, self.v[keys].repeat_interleave(group, 1).double())
        return y.float(), lse.t().float()


def per_sample(kernel: Callable[[Sample], Tensor]) -> Callable[..., Tensor]:
    """Return a subject of the contracts that calls `kernel` for each sample."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        queries: Samples = options.pop("q_samples", None) or default_samples(q)
        keys: Samples = options.pop("k_samples", None) or default_samples(k)
        rows, known, values = (t.flatten(0, -3) for t in (q, k, v))
        parts, at = [], 0
        spans = sorted(zip(queries.spans, keys.spans, strict=True))
        for (start, asked), (first, count) in spans:
            if not asked:
                continue
            here = slice(first, first + count)
            sample = Sample(rows[start : start + asked], known[here], values[here], options)
            parts += [torch.zeros_like(rows[at:start]), kernel(sample).to(q.dtype)]
            at = start + asked
        return torch.cat([*parts, torch.zeros_like(rows[at:])]).view(q.shape)

    return call


def merged(parts: list[Parts], dtype: torch.dtype = torch.float32) -> Tensor:
    """Merge the results over parts of the keys by their log-sum-exps."""
    sums = torch.stack([lse for _, lse in parts])
    most = sums.amax(0)
    weights = (sums - torch.where(most == -torch.inf, 0.0, most)).exp().unsqueeze(-1)
    total = torch.zeros_like(parts[0][0], dtype=dtype)
    for weight, (y, _) in zip(weights, parts, strict=True):
        total = total + (weight * y).to(dtype)
    return total.float() / weights.sum(0)


def blocks_of(keys: int, size: int = ATTENTION_BLOCK) -> list[slice]:
    """Cut the keys into blocks, starting at the first."""
    return [slice(at, min(at + size, keys)) for at in range(0, keys, size)]


def portable_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, **options: Any
) -> Tensor:
    """Return the portable executor's result for one packed sample."""
    keys, mask = len(k), mask_of(q, is_causal, **options)
    starts = [list(range(0, keys, ATTENTION_BLOCK))]
    spans, lengths = torch.tensor([[0, len(q)]]), torch.tensor([keys])
    return portable.attention(q, k, v, spans, torch.tensor(starts), lengths, mask)[0]


# ---- planted --------------------------------------------------------------------------------------------


def _by_count(sample: Sample) -> Tensor:
    size = -(-len(sample.k) // 4)
    return merged([sample.over(part) for part in blocks_of(len(sample.k), max(size, 1))])


def _from_the_chunk(sample: Sample) -> Tensor:
    edges = sorted({0, sample.past, len(sample.k)})
    return merged([sample.over(slice(*edge)) for edge in pairwise(edges)])


def _not_rescaled(sample: Sample) -> Tensor:
    """Give the results of all blocks the same weight."""
    if len(sample.k) <= ATTENTION_BLOCK:
        return sample.over(slice(0, len(sample.k)))[0]
    parts = [sample.over(part) for part in blocks_of(len(sample.k))]
    return merged([(y, torch.where(lse == -torch.inf, lse, 0.0)) for y, lse in parts])


def _narrow(sample: Sample) -> Tensor:
    return merged([sample.over(part) for part in blocks_of(len(sample.k))], torch.bfloat16)


def _summed_backwards(sample: Sample) -> Tensor:
    """Fold the blocks from the last to the first."""
    return merged([sample.over(part) for part in reversed(blocks_of(len(sample.k)))])


def _mixed_heads(sample: Sample) -> Tensor:
    """Read key head h mod H_kv for query head h: repeated instead of interleaved."""
    group = sample.q.shape[1] // sample.k.shape[1]
    sample.k, sample.v = sample.k.repeat(1, group, 1), sample.v.repeat(1, group, 1)
    return sample.over(slice(0, len(sample.k)))[0]


def _sees_the_next(sample: Sample) -> Tensor:
    """Shift the causal mask by one."""
    sample.past += 1
    return sample.over(slice(0, len(sample.k)))[0]


split_by_count = per_sample(_by_count)
cut_from_the_chunk = per_sample(_from_the_chunk)
without_rescaling = per_sample(_not_rescaled)
bf16_accumulator = per_sample(_narrow)
summed_backwards = per_sample(_summed_backwards)
heads_mixed = per_sample(_mixed_heads)
sees_the_next = per_sample(_sees_the_next)


def padding_counted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Count keys of padding as exp(0) in the denominator: scores zeroed instead of masked."""
    queries = options.get("q_samples") or default_samples(q)
    keys = options.get("k_samples") or default_samples(k)
    y, rows, known = attention(q, k, v, **options), q.flatten(0, -3), k.flatten(0, -3)
    extra = keys.rows - sum(count for _, count in keys.spans)
    shares = torch.ones(len(rows), q.shape[-2])
    for (start, asked), (first, count) in zip(queries.spans, keys.spans, strict=True):
        here = slice(first, first + count)
        mine = {
            name: value for name, value in options.items() if name not in ("q_samples", "k_samples")
        }
        _, lse = Sample(rows[start : start + asked], known[here], known[here], mine).over(
            slice(0, count)
        )
        shares[start : start + asked] = 1 / (1 + extra / len(keys.spans) * torch.exp(-lse))
    return (y * shares.view(*q.shape[:-1], 1)).to(q.dtype)


def batch_maximum(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Subtract the largest score of the whole call instead of the query's own."""
    largest = [float(t.detach().abs().max()) if t.numel() else 0.0 for t in (q, k)]
    most = max(largest[0] * largest[1] * q.shape[-1], 1.0)

    def kernel(sample: Sample) -> Tensor:
        group = sample.q.shape[1] // sample.k.shape[1]
        terms = (sample.scores(slice(0, len(sample.k))).float() - most).double().add(most).exp()
        y = torch.einsum("hqk,khd->qhd", terms, sample.v.repeat_interleave(group, 1).double())
        return y / terms.sum(-1).t().unsqueeze(-1)

    return per_sample(kernel)(q, k, v, **options)


def row_blocks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Cut blocks at rows of the batch instead of positions of the sample."""
    keys = options.get("k_samples") or default_samples(k)
    first = iter([start for start, count in sorted(keys.spans) if count])

    def kernel(sample: Sample) -> Tensor:
        edge = min(-next(first) % ATTENTION_BLOCK, len(sample.k))
        rest = [slice(edge + b.start, edge + b.stop) for b in blocks_of(len(sample.k) - edge)]
        return merged([sample.over(part) for part in ([slice(0, edge)] if edge else []) + rest])

    return per_sample(kernel)(q, k, v, **options)


def window_off_by_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Count only the keys before the query in a window."""
    window = options.pop("window", None)
    return attention(q, k, v, window=None if window is None else window + 1, **options)


def without_the_cap(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Leave scores as they are."""
    return attention(q, k, v, **{**options, "softcap": None})


def one_sided(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """See only the side before a query in a window of both."""
    sided = {"is_causal": True} if options.get("window") else {}
    return attention(q, k, v, **{**options, **sided})


def chunks_from_the_call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Cut chunks where a call's queries begin instead of positions of the sample."""
    size = options.pop("chunk_size", None)
    if size is None:
        return attention(q, k, v, **options)
    return attention(q, k, v, chunk_size=size + len(q) % 2, **options)


def chunks_as_windows(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """See as many keys as a chunk has, wherever the chunk begins."""
    size = options.pop("chunk_size", None)
    return attention(q, k, v, **({} if size is None else {"window": size}), **options)


def slope_forgotten(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Differentiate scores as if they had no cap."""

    def backward(grad: Tensor, *given: Tensor) -> Sequence[Tensor]:
        return gradients(without_the_cap, given, grad, **options)

    return with_backward(partial(attention, **options), backward, q, k, v)


def zero_times_infinity(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Multiply weights that are zero with masked values."""
    return attention(q, k, v, **options) + 0 * (k.sum() + v.sum()).to(q.dtype)


def a_hair_less(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Add an epsilon to the denominator, as norms do."""
    return (attention(q, k, v, **options).float() * (1 - 2.0**-12)).to(q.dtype)


def without_the_last(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Leave the last key out of the denominator."""
    share = (k.shape[-3] + 1) / max(k.shape[-3], 1) if k.shape[-3] > 1 else 1.0
    return (attention(q, k, v, **options).float() * share).to(q.dtype)


Change = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def with_gradients(change: Change) -> Callable[..., Tensor]:
    """Return attention whose gradients are `change(dq, dk, dv, q)`; its output is right."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        def backward(grad: Tensor, *given: Tensor) -> Sequence[Tensor]:
            return change(*gradients(attention, given, grad, **options), given[0])  # type: ignore[call-arg]

        return with_backward(partial(attention, **options), backward, q, k, v)

    return call


def _rounded(dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return dq.bfloat16().to(q.dtype), dk.bfloat16().to(q.dtype), dv.bfloat16().to(q.dtype)


def _by_threads(dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Change dk a little where there is more than one thread."""
    return dq, dk if torch.get_num_threads() == 1 else dk * (1 + 2.0**-7), dv


bf16_gradients = with_gradients(_rounded)
thread_gradients = with_gradients(_by_threads)


# Planted wrong attentions that are right up to 2048 keys: the portable executor with other chunks or merges.

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
    mask = sample.mask
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
