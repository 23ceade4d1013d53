"""What kv-cache-kernel-v1 claims: pieces, forks, cuts and scattered pages never change a bit; and wrong caches."""

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
from isobit.errors import ArgumentError
from isobit.library.attention.claims import on_one_thread
from isobit.library.attention.planted import stock as stock_attention
from isobit.library.attention.subject import attention
from isobit.machine import thread_count
from isobit.ops.attention.cache import PAGE, KVCache, Sequence

PIECES = (1, 7, 64, 3, 100, 1, 1, 70)


@dataclass(frozen=True)
class Cached:
    """Attention by way of a cache: `make(heads, depth, dtype, pages)` makes one."""

    make: Callable[..., Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        cache, sequence = self.holding(k, v)
        if not len(q):
            return torch.zeros_like(q)
        return cache.attend(q, [sequence], [len(q)], **options)  # type: ignore[no-any-return]

    def empty(self, k: Tensor, pages: int = 1) -> Any:
        """For keys like these."""
        return self.make(k.shape[1], k.shape[2], k.dtype, pages)

    def holding(self, k: Tensor, v: Tensor) -> tuple[Any, Sequence]:
        """A cache with one sequence."""
        cache = self.empty(k)
        sequence = cache.start()
        cache.append(sequence, k, v)
        return cache, sequence


def pieces_of(tokens: int, first: int) -> Iterator[tuple[int, int]]:
    """A sequence cut into pieces of many sizes."""
    at = 0
    while at < tokens:
        end = min(at + PIECES[first % len(PIECES)], tokens)
        yield at, end
        at, first = end, first + 1


@on_one_thread
def by_pieces(subject: Cached, case: Case, tally: Tally) -> None:
    """Appended in pieces of any size, and asked after each: the bits of attention over keys that lie in a row."""
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
    """A fork with another future, a cut and a new start: both sequences keep the bits of their own past."""
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
    beside = attention(
        q, torch.cat([k[:shared], other_k[shared:]]), torch.cat([v[:shared], other_v[shared:]])
    )
    tally.same(cache.attend(q, [main], [tokens]), whole, "after a fork was written")
    tally.same(cache.attend(q, [fork], [tokens]), beside, "a fork with its own future")
    cache.truncate(main, cut)
    tally.same(cache.attend(q, [fork], [tokens]), beside, "a fork whose origin was cut")
    if cut:
        tally.same(cache.attend(q[:cut], [main], [cut]), whole[:cut], "cut")
    cache.append(main, other_k[cut:shared], other_v[cut:shared])
    cache.truncate(main, cut)
    cache.append(main, k[cut:], v[cut:])
    tally.same(cache.attend(q, [main], [tokens]), whole, "cut, and grown again")
    tally.same(cache.attend(q, [fork], [tokens]), beside, "a fork whose origin was grown again")


@on_one_thread
def scattered(subject: Cached, case: Case, tally: Tally) -> None:
    """Sequences that grow by turns, in pages others have left, asked together: each as if it were alone."""
    q, k, v = case.arguments.values()
    tokens = len(q)
    tally.count(tokens * q.shape[1])
    streams = [(q, k, v)]
    for first in (63, 66):
        streams.append(
            (
                case.draw(q.shape, first),
                case.draw(k.shape, first + 1),
                case.draw(v.shape, first + 2),
            )
        )
    cache = subject.empty(k)
    sequences = [cache.start() for _ in streams]
    left = cache.start()
    cache.append(left, v, k)  # its pages are free again before the others' last ones are taken
    for number, (at, end) in enumerate(pieces_of(tokens, case.recipe.seed)):
        if number == 2:
            cache.truncate(left, 0)
        for sequence, (_, keys, values) in zip(sequences, streams, strict=True):
            cache.append(sequence, keys[at:end], values[at:end])
    whole = [attention(*stream) for stream in streams]
    for threads in THREADS:
        with thread_count(threads):
            counts = [tokens, 1, tokens // 2]
            asked = torch.cat(
                [stream[0][tokens - n :] for stream, n in zip(streams, counts, strict=True)]
            )
            expected = torch.cat([y[tokens - n :] for y, n in zip(whole, counts, strict=True)])
            tally.same(
                cache.attend(asked, sequences, counts),
                expected,
                f"asked together, {threads} threads",
            )
    last = torch.cat([stream[0][-1:] for stream in streams])
    tally.same(
        cache.attend(last, sequences), torch.cat([y[-1:] for y in whole]), "decoded together"
    )


def refuses(subject: Cached, case: Case, tally: Tally) -> None:
    """Each misuse is refused by an ArgumentError, with a remedy."""
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
        tally.compared += 1
        try:
            call()
        except ArgumentError as refusal:
            if "remedy" not in str(refusal):
                tally.fail(f"{what}: refused without a remedy")
        except Exception as other:
            tally.fail(f"{what}: {type(other).__name__} instead of ArgumentError")
        else:
            tally.fail(f"{what}: accepted")


# ---- stock, and planted ---------------------------------------------------------------------------------


class StockCache(KVCache):
    """Keys put together anew for torch's own attention."""

    def attend(
        self,
        q: Tensor,
        sequences: Ordered[Sequence],
        counts: Ordered[int] | None = None,
        **options: Any,
    ) -> Tensor:
        parts, at = [], 0
        for sequence, count in zip(sequences, counts or [1] * len(sequences), strict=True):
            k, v = (
                pool[sequence.pages].flatten(0, 1)[: sequence.length]
                for pool in (self._keys, self._values)
            )
            parts.append(stock_attention(q[at : at + count], k, v, **options))
            at += count
        return torch.cat(parts)


class WithoutCopies(KVCache):
    """A shared page is written in place: one sequence's future stands in the other's."""

    def _page_to_write(self, sequence: Sequence) -> int:
        if sequence.length % PAGE == 0:
            sequence.pages.append(self._free_page())
        return sequence.pages[-1]


class InPageOrder(KVCache):
    """Pages are read in the order in which they lie."""

    def attend(self, q: Tensor, sequences: Ordered[Sequence], *rest: Any, **options: Any) -> Tensor:
        return super().attend(
            q, [Sequence(sorted(s.pages), s.length) for s in sequences], *rest, **options
        )


class WithStaleKeys(KVCache):
    """A cut frees whole pages and forgets the rest: keys behind the cut are still seen."""

    def truncate(self, sequence: Sequence, length: int) -> None:
        super().truncate(sequence, min(-(-length // 8) * 8, sequence.length))


class FreesShared(KVCache):
    """A cut frees pages that a fork still holds."""

    def truncate(self, sequence: Sequence, length: int) -> None:
        for page in sequence.pages[-(-length // PAGE) :]:
            self._owners[page] = 1
        super().truncate(sequence, length)


class Narrow(KVCache):
    """Keys and values are scaled by 1 + 2^-5 and kept in bf16."""

    def append(self, sequence: Sequence, k: Tensor, v: Tensor) -> None:
        def lossy(t: Tensor) -> Tensor:
            return (t.float() * (1 + 2.0**-5)).bfloat16().to(t.dtype)

        super().append(sequence, lossy(k), lossy(v))


class FirstOnly(KVCache):
    """Only the first sequence is looked up: all queries read its pages."""

    def attend(self, q: Tensor, sequences: Ordered[Sequence], *rest: Any, **options: Any) -> Tensor:
        return super().attend(q, [sequences[0]] * len(sequences), *rest, **options)


class Careless(KVCache):
    """Takes every cut."""

    def truncate(self, sequence: Sequence, length: int) -> None:
        super().truncate(sequence, max(0, min(length, sequence.length)))


ours = Cached(KVCache)
stock = Cached(StockCache)
without_copies = Cached(WithoutCopies)
in_page_order = Cached(InPageOrder)
with_stale_keys = Cached(WithStaleKeys)
frees_shared = Cached(FreesShared)
narrow = Cached(Narrow)
first_only = Cached(FirstOnly)
careless = Cached(Careless)
