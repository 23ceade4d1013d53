"""Claims of kv-cache-kernel-v1: pieces, forks, truncation and scattered pages change no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import THREADS
from isobit.foundation.machine import thread_count
from isobit.library.attention.planted import attention
from isobit.library.claims import must_raise, on_one_thread
from isobit.library.stock import attention as stock_attention
from isobit.ops.attention.cache import PAGE, KVCache, Sequence

PIECES = (1, 7, 64, 3, 100, 1, 1, 70)


@dataclass(frozen=True)
class Cached:
    """Attention through a cache, which `make(heads, depth, dtype, pages)` returns."""

    make: Callable[..., Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Append all keys, then attend."""
        cache, sequence = self.holding(k, v)
        if not len(q):
            return torch.zeros_like(q)
        return cache.attend(q, [sequence], [len(q)], **options)  # type: ignore[no-any-return]

    def empty(self, k: Tensor, pages: int = 1) -> Any:
        """Return an empty cache for keys of this shape and dtype."""
        return self.make(k.shape[1], k.shape[2], k.dtype, pages)

    def holding(self, k: Tensor, v: Tensor) -> tuple[Any, Sequence]:
        """Return a cache with one sequence of these keys, and the sequence."""
        cache = self.empty(k)
        sequence = cache.start()
        cache.append(sequence, k, v)
        return cache, sequence


def pieces_of(tokens: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the pieces of a sequence, of many sizes."""
    at = 0
    while at < tokens:
        end = min(at + PIECES[first % len(PIECES)], tokens)
        yield at, end
        at, first = end, first + 1


@on_one_thread
def by_pieces(subject: Cached, case: Case, tally: Tally) -> None:
    """Appending in pieces of any size, and attending after each, has the bits of contiguous attention."""
    q, k, v = case.arguments.values()
    whole = attention(q, k, v, **case.options)
    tally.count(len(q) * q.shape[1])
    tally.same(subject(q, k, v, **case.options), whole, "appended at once")
    cache, sequence = subject.holding(k[:0], v[:0])
    for at, end in pieces_of(len(q), case.recipe.seed):
        cache.append(sequence, k[at:end], v[at:end])
        found = cache.attend(q[at:end], [sequence], [end - at], **case.options)
        tally.same(found, whole[at:end], f"appended and asked from {at} to {end}")


@on_one_thread
def forked_and_cut(subject: Cached, case: Case, tally: Tally) -> None:
    """After a fork, a truncation and a new start both sequences have the bits of their own keys."""
    q, k, v = case.arguments.values()
    tokens = len(q)
    tally.count(tokens * q.shape[1])
    other_k, other_v = case.draw(tuple(k.shape), 61), case.draw(tuple(v.shape), 62)
    shared, cut = tokens * 2 // 3, tokens // 4
    cache, main = subject.holding(k[:shared], v[:shared])
    fork = cache.fork(main)
    cache.append(fork, other_k[shared:], other_v[shared:])
    cache.append(main, k[shared:], v[shared:])
    whole = attention(q, k, v)
    forked = attention(
        q, torch.cat([k[:shared], other_k[shared:]]), torch.cat([v[:shared], other_v[shared:]])
    )
    tally.same(cache.attend(q, [main], [tokens]), whole, "after a fork was written")
    tally.same(cache.attend(q, [fork], [tokens]), forked, "a fork with its own future")
    cache.truncate(main, cut)
    tally.same(cache.attend(q, [fork], [tokens]), forked, "a fork whose origin was cut")
    if cut:
        tally.same(cache.attend(q[:cut], [main], [cut]), whole[:cut], "cut")
    cache.append(main, other_k[cut:shared], other_v[cut:shared])
    cache.truncate(main, cut)
    cache.append(main, k[cut:], v[cut:])
    tally.same(cache.attend(q, [main], [tokens]), whole, "cut, and grown again")
    tally.same(cache.attend(q, [fork], [tokens]), forked, "a fork whose origin was grown again")


@on_one_thread
def scattered(subject: Cached, case: Case, tally: Tally) -> None:
    """Sequences that grow alternately, in reused pages, and are attended together have the bits of each alone."""
    q, k, v = case.arguments.values()
    tokens = len(q)
    tally.count(tokens * q.shape[1])
    streams: list[tuple[Tensor, ...]] = [(q, k, v)]
    for first in (63, 66):
        streams.append(tuple(case.draw(t.shape, first + i) for i, t in enumerate((q, k, v))))
    cache = subject.empty(k)
    sequences = [cache.start() for _ in streams]
    left = cache.start()
    cache.append(left, v, k)  # its pages are freed before the others take their last ones
    for number, (at, end) in enumerate(pieces_of(tokens, case.recipe.seed)):
        if number == 2:
            cache.truncate(left, 0)
        for sequence, (_, keys, values) in zip(sequences, streams, strict=True):
            cache.append(sequence, keys[at:end], values[at:end])
    whole = [attention(*stream) for stream in streams]
    for threads in THREADS:
        with thread_count(threads):
            counts = [tokens, 1, tokens // 2]
            queries = [stream[0] for stream in streams]
            asked, expected = (
                torch.cat([t[tokens - n :] for t, n in zip(tensors, counts, strict=True)])
                for tensors in (queries, whole)
            )
            found = cache.attend(asked, sequences, counts)
            tally.same(found, expected, f"asked together, {threads} threads")
    last = torch.cat([stream[0][-1:] for stream in streams])
    expected = torch.cat([y[-1:] for y in whole])
    tally.same(cache.attend(last, sequences), expected, "decoded together")


def refuses(subject: Cached, case: Case, tally: Tally) -> None:
    """Each misuse raises an ArgumentError with a remedy."""
    q, k, v = case.arguments.values()
    tally.count(1)
    cache, sequence = subject.holding(k, v)
    misuses: dict[str, Callable[[], Any]] = {
        "keys of another depth": lambda: cache.append(sequence, k[..., :8], v[..., :8]),
        "values of another length": lambda: cache.append(sequence, k, v[:-1]),
        "keys of another dtype": lambda: cache.append(sequence, k.double(), v.double()),
        "a cut that grows": lambda: cache.truncate(sequence, len(k) + 1),
        "a negative cut": lambda: cache.truncate(sequence, -1),
        "more queries than positions": lambda: cache.attend(
            torch.cat([q, q]), [sequence], [2 * len(q)]
        ),
        "queries without a count": lambda: cache.attend(torch.cat([q, q]), [sequence]),
        "a window of none": lambda: cache.attend(q, [sequence], [len(q)], window=0),
        "no heads": lambda: subject.make(0, 16, q.dtype, 1),
    }
    for what, call in misuses.items():
        must_raise(call, what, tally)


ours = Cached(KVCache)


# Stock attention over a cache, and planted wrong caches.


class StockCache(KVCache):
    """Gathers keys into one tensor for torch's attention."""

    def attend(
        self, q: Tensor, sequences: Ordered[Sequence], counts: Any = None, **options: Any
    ) -> Tensor:
        """Compute attention per sequence."""
        parts, pools = [], (self._keys, self._values)
        for own, sequence in zip(torch.split(q, counts or 1), sequences, strict=True):
            k, v = (p[sequence.pages].flatten(0, 1)[: sequence.length] for p in pools)
            parts.append(stock_attention(own, k, v, **options))
        return torch.cat(parts)


class WithoutCopies(KVCache):
    """Writes a shared page in place: one sequence overwrites the other's keys."""

    def _page_to_write(self, sequence: Sequence) -> int:
        if sequence.length % PAGE == 0:
            sequence.pages.append(self._free_page())
        return sequence.pages[-1]


class InPageOrder(KVCache):
    """Reads pages in memory order."""

    def attend(self, q: Tensor, sequences: Ordered[Sequence], *rest: Any, **options: Any) -> Tensor:
        """Attend wrongly."""
        return super().attend(
            q, [Sequence(sorted(s.pages), s.length) for s in sequences], *rest, **options
        )


class WithStaleKeys(KVCache):
    """Truncates to a multiple of 8 positions: keys behind the cut are still read."""

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Truncate wrongly."""
        super().truncate(sequence, min(-(-length // 8) * 8, sequence.length))


class FreesShared(KVCache):
    """Frees pages that a fork still uses."""

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Truncate wrongly."""
        for page in sequence.pages[-(-length // PAGE) :]:
            self._owners[page] = 1
        super().truncate(sequence, length)


class Narrow(KVCache):
    """Scales keys and values by 1 + 2^-5 and stores them in bf16."""

    def append(self, sequence: Sequence, k: Tensor, v: Tensor) -> None:
        """Append wrongly."""

        def lossy(t: Tensor) -> Tensor:
            return (t.float() * (1 + 2.0**-5)).bfloat16().to(t.dtype)

        super().append(sequence, lossy(k), lossy(v))


class FirstOnly(KVCache):
    """Reads the first sequence's pages for all queries."""

    def attend(self, q: Tensor, sequences: Ordered[Sequence], *rest: Any, **options: Any) -> Tensor:
        """Attend wrongly."""
        return super().attend(q, [sequences[0]] * len(sequences), *rest, **options)


class Careless(KVCache):
    """Accepts every length to truncate to."""

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Truncate wrongly."""
        super().truncate(sequence, max(0, min(length, sequence.length)))


stock = Cached(StockCache)
without_copies = Cached(WithoutCopies)
in_page_order = Cached(InPageOrder)
with_stale_keys = Cached(WithStaleKeys)
frees_shared = Cached(FreesShared)
narrow = Cached(Narrow)
first_only = Cached(FirstOnly)
careless = Cached(Careless)
