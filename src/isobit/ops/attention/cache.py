"""A paged cache of keys and values for decoding: sequences are appended to, forked and truncated."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.attention.op import (
    BlockTable,
    attend,
    check_attention,
    mask_of,
    spans_tensor,
)
from isobit.order.plan import ATTENTION_BLOCK
from isobit.order.samples import Samples

PAGE = ATTENTION_BLOCK  # a page is one block of keys, so its position in memory cannot matter


@dataclass
class Sequence:
    """The keys of one sample: their pages in the cache, and how many keys there are."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class KVCache:
    """The keys and values of one layer, for any number of sequences.

    A page of 64 keys may belong to several sequences (`fork`); a sequence that writes to a shared page copies it first.

    Args:
        num_heads: The number of key heads.
        head_dim: The size of a head.
        dtype: The dtype of keys and values.
        pages: How many pages to allocate at first; the cache grows when they are used up.
        device: Where keys and values are kept: the CPU, or a GPU.

    Raises:
        ArgumentError: If a size is less than 1.

    Example:
        >>> q, k, v = (torch.randn(3, 2, 16) for _ in range(3))
        >>> cache = isobit.KVCache(num_heads=2, head_dim=16)
        >>> sequence = cache.start()
        >>> cache.append(sequence, k, v)
        >>> whole = isobit.attention(q, k, v, is_causal=True)
        >>> torch.equal(cache.attend(q[-1:], [sequence]), whole[-1:])
        True
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        pages: int = 16,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(num_heads, head_dim, pages) < 1:
            raise ArgumentError(
                expected="num_heads, head_dim and pages of 1 or more",
                received=f"num_heads={num_heads}, head_dim={head_dim}, pages={pages}",
                remedy="pass the model's number of key heads and its head size",
            )
        shape = (pages, PAGE, num_heads, head_dim)
        self._keys, self._values = (
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)
        )
        self._owners = [0] * pages

    def start(self) -> Sequence:
        """Return an empty sequence."""
        return Sequence()

    @torch.no_grad()
    def append(self, sequence: Sequence, k: Tensor, v: Tensor) -> None:
        """Append keys and values [T, num_heads, head_dim] of the next T positions."""
        check_tensors(WITH_GPU, k=k, v=v, cache=self._keys)
        num_heads, head_dim = self._keys.shape[2:]
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dim() != 3 or tensor.shape != (len(k), num_heads, head_dim):
                refuse_shape(name, tensor, f"[T, {num_heads}, {head_dim}]", "pass one layer's rows")
        at = 0
        while at < len(k):
            page, offset = self._page_to_write(sequence), sequence.length % PAGE
            count = min(PAGE - offset, len(k) - at)
            self._keys[page, offset : offset + count] = k[at : at + count]
            self._values[page, offset : offset + count] = v[at : at + count]
            sequence.length, at = sequence.length + count, at + count

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a second sequence with the same past; the two share pages until one of them writes."""
        for page in sequence.pages:
            self._owners[page] += 1
        return Sequence(list(sequence.pages), sequence.length)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drop everything after the first `length` positions."""
        if not 0 <= length <= sequence.length:
            raise ArgumentError(
                expected=f"a length from 0 to {sequence.length}",
                received=f"{length}",
                remedy="pass a length up to the present one; use append to add keys",
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
        softcap: float | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Compute causal attention of queries to the cached keys.

        Args:
            q: Packed queries [R, H, D]: the last `counts[i]` positions of each sequence i, one sequence after another.
            sequences: The sequences that the queries belong to.
            counts: The number of queries per sequence; by default one, its last position.
            scale: See isobit.attention.
            window: See isobit.attention.
            softcap: See isobit.attention.
            chunk_size: See isobit.attention.

        Returns:
            Tensor [R, H, D].

        Raises:
            ArgumentError: If the counts do not fit q, or a sequence has fewer keys than queries.
        """
        queries = Samples.packed(counts if counts is not None else [1] * len(sequences))
        k, v = self._keys.flatten(0, 1), self._values.flatten(0, 1)
        check_tensors(WITH_GPU, q=q, cache=k)
        check_attention(q, k, v)
        rows = [count for _, count in queries.spans]
        if (
            queries.rows != len(q)
            or len(rows) != len(sequences)
            or any(count > s.length for count, s in zip(rows, sequences, strict=True))
        ):
            raise ArgumentError(
                expected=f"{len(q)} queries, each a position of its sequence",
                received=f"counts {rows} for sequences of {[s.length for s in sequences]}",
                remedy="append the keys of the queries first, and pass one count per sequence",
            )
        starts = [[page * PAGE for page in s.pages] for s in sequences]
        table = BlockTable(starts, [s.length for s in sequences], k.device)
        return attend(
            q,
            k,
            v,
            spans_tensor(queries, q.device),
            table,
            mask_of(q, True, scale, window, softcap, chunk_size),
        )

    @property
    def nbytes(self) -> int:
        """Memory of all pages in bytes."""
        return self._keys.nbytes + self._values.nbytes

    def _page_to_write(self, sequence: Sequence) -> int:
        """Return the page of the next position, after making this sequence its only owner."""
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
