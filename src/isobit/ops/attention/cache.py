"""Keys and values kept in pages for decoding: appended, forked and truncated without ever changing a bit."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.attention.op import BlockTable, attend, check_attention, check_scale, check_window
from isobit.ops.attention.portable import Mask
from isobit.order.plan import ATTENTION_BLOCK
from isobit.order.samples import Samples

PAGE = ATTENTION_BLOCK  # a page is a block of keys, so where a page lies cannot matter


@dataclass
class Sequence:
    """One sample's keys: which pages hold them, and how many there are."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class KVCache:
    """The keys and values of one layer, for any number of sequences.

    A page of 64 keys may belong to several sequences (`fork`); the one that writes to a shared page takes a copy first.
    """

    def __init__(
        self, heads: int, depth: int, dtype: torch.dtype = torch.float32, pages: int = 16
    ) -> None:
        if min(heads, depth, pages) < 1:
            raise ArgumentError(
                expected="one head, a depth of one and one page, or more",
                received=f"heads={heads}, depth={depth}, pages={pages}",
                remedy="pass the model's key heads and head size",
            )
        shape = (pages, PAGE, heads, depth)
        self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self._owners = [0] * pages

    def start(self) -> Sequence:
        """An empty sequence."""
        return Sequence()

    @torch.no_grad()
    def append(self, sequence: Sequence, k: Tensor, v: Tensor) -> None:
        """Keys and values [T, heads, depth] of the next T positions."""
        check_tensors(k=k, v=v, cache=self._keys)
        heads, depth = self._keys.shape[2:]
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dim() != 3 or tensor.shape != (len(k), heads, depth):
                refuse_shape(name, tensor, f"[T, {heads}, {depth}]", "pass one layer's rows")
        at = 0
        while at < len(k):
            page, offset = self._page_to_write(sequence), sequence.length % PAGE
            count = min(PAGE - offset, len(k) - at)
            self._keys[page, offset : offset + count] = k[at : at + count]
            self._values[page, offset : offset + count] = v[at : at + count]
            sequence.length, at = sequence.length + count, at + count

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same past; they share pages until one of them writes."""
        for page in sequence.pages:
            self._owners[page] += 1
        return Sequence(list(sequence.pages), sequence.length)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forgets what came after the first `length` positions."""
        if not 0 <= length <= sequence.length:
            raise ArgumentError(
                expected=f"a length from 0 to {sequence.length}",
                received=f"{length}",
                remedy="a sequence can be cut, not grown: append keys instead",
            )
        kept = -(-length // PAGE)
        for page in sequence.pages[kept:]:
            self._owners[page] -= 1
        del sequence.pages[kept:]
        sequence.length = length

    def attend(
        self,
        q: Tensor,
        sequences: Ordered[Sequence],
        counts: Ordered[int] | None = None,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Causal attention of packed queries [R, H, D]; the last `counts[i]` positions of sequence i are asked about.

        By default each sequence has one query, its last position.
        """
        asked = Samples.packed(counts if counts is not None else [1] * len(sequences))
        k, v = self._keys.flatten(0, 1), self._values.flatten(0, 1)
        check_tensors(q=q, cache=k)
        check_attention(q, k, v)
        rows = [count for _, count in asked.spans]
        if (
            asked.rows != len(q)
            or len(rows) != len(sequences)
            or any(count > s.length for count, s in zip(rows, sequences, strict=True))
        ):
            raise ArgumentError(
                expected=f"{len(q)} queries, each a position of its sequence",
                received=f"counts {rows} for sequences of {[s.length for s in sequences]}",
                remedy="append the queries' own keys first, and pass a count for each sequence",
            )
        starts = [[page * PAGE for page in s.pages] for s in sequences]
        table = BlockTable(starts, [s.length for s in sequences], k.device)
        return attend(
            q,
            k,
            v,
            asked,
            table,
            Mask(check_scale(scale, q.shape[-1]), True, check_window(window, True)),
        )

    @property
    def nbytes(self) -> int:
        """Memory of all pages."""
        return self._keys.nbytes + self._values.nbytes

    def _page_to_write(self, sequence: Sequence) -> int:
        """The page of the next position, owned by this sequence alone."""
        if sequence.length % PAGE == 0:
            sequence.pages.append(self._free_page())
        elif self._owners[sequence.pages[-1]] > 1:
            shared, sequence.pages[-1] = sequence.pages[-1], self._free_page()
            self._owners[shared] -= 1
            for pool in (self._keys, self._values):
                pool[sequence.pages[-1]] = pool[shared]
        return sequence.pages[-1]

    def _free_page(self) -> int:
        if 0 not in self._owners:
            grown = [
                torch.cat([pool, torch.zeros_like(pool)]) for pool in (self._keys, self._values)
            ]
            self._keys, self._values = grown
            self._owners += [0] * len(self._owners)
        page = self._owners.index(0)
        self._owners[page] = 1
        return page
