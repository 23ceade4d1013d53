"""Stock attention over a cache, and planted wrong caches."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Any

import torch
from torch import Tensor

from isobit.library.kv_cache.claims import Cached
from isobit.library.stock import attention as stock_attention
from isobit.ops.attention.cache import PAGE, KVCache, Sequence


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
