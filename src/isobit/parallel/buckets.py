"""Tensors exchanged in flat buckets while backward still runs: filled in any order, launched in one order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.parallel import exchange

BUCKET_BYTES = 25 << 20


class BucketedExchange:
    """All-reduces of tensors of these sizes; buckets are kept from step to step, so results are good until the next."""

    def __init__(
        self,
        sizes: Sequence[int],
        group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group, self._works = group, list[exchange.Flight]()
        self._bucket_of: list[int] = []
        counts: list[int] = []
        for size in sizes:
            if not counts or counts[-1] * dtype.itemsize >= bucket_bytes:
                counts.append(0)
            self._bucket_of.append(len(counts) - 1)
            counts[-1] += size
        self._buckets = [torch.empty(count, dtype=dtype) for count in counts]
        split = [[s for s, b in zip(sizes, self._bucket_of, strict=True) if b == bucket] for bucket in range(len(counts))]
        self._views = [v for flat, parts in zip(self._buckets, split, strict=True) for v in flat.split(parts)]
        self._awaited = self._count()

    def _count(self) -> list[int]:
        return [self._bucket_of.count(bucket) for bucket in range(len(self._buckets))]

    def ready(self, index: int, tensor: Tensor) -> None:
        """Copies a tensor into its place; every bucket that is then full, and has none before it to wait for, flies."""
        self._views[index].copy_(tensor.detach().reshape(-1))
        self._awaited[self._bucket_of[index]] -= 1
        while len(self._works) < len(self._buckets) and not self._awaited[len(self._works)]:
            work = exchange.all_reduce(self._buckets[len(self._works)], self._group, async_op=True)
            assert work is not None
            self._works.append(work)

    def finish(self) -> list[Tensor]:
        """The sums, as flat views, in the order of the sizes."""
        assert len(self._works) == len(self._buckets), "a tensor was never ready"
        for work in self._works:
            work.wait()
        self.clear()
        return self._views

    def clear(self) -> None:
        """Ready for the next step."""
        self._works.clear()
        self._awaited = self._count()
