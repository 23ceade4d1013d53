"""Digests of weights that do not depend on how they are fused or sharded: a hash per row, and a tree over rows.

[Note: a hash per row] A row is cut into `parts_of(columns)` equal blocks of columns. Each block has a BLAKE3 hash, a
row the hash of its blocks' hashes, and a tensor the root of the balanced tree over its rows. So

- a fused weight (`qkv_proj`) has the rows of its parts, and a part the rows that the fused one has at its place;
- shards along rows have the rows of the whole; shards along columns have whole blocks of its rows, if their number
  divides `parts_of(columns)`, at most 8.

Whoever has only a part computes hashes of its own rows or blocks, and joins them with those of others: by construction
the digest is that of the whole. Rows are hashed as they are stored; `dtype=` converts first, as a weight sync does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from isobit.bits import as_integers
from isobit.errors import ArgumentError

SIZE = 16  # bytes of a hash
MOST_PARTS = 8


def parts_of(columns: int) -> int:
    """Return the number of blocks that a row is cut into: the largest power of two up to 8 that divides it."""
    parts = MOST_PARTS
    while columns % parts:
        parts //= 2
    return max(parts, 1)


@dataclass(frozen=True)
class RowDigests:
    """The hashes of a tensor's rows.

    Attributes:
        dtype: Its dtype, without "torch.".
        shape: Its shape.
        rows: The rows' hashes, 16 bytes each, one after the other; empty for a shard of columns.
        blocks: The hashes of a shard's blocks, row by row; empty for a tensor that has whole rows.
    """

    dtype: str
    shape: tuple[int, ...]
    rows: bytes
    blocks: bytes = b""

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.shape[0] if self.shape else 1

    @property
    def digest(self) -> str:
        """32 hexadecimal digits of dtype, shape and all rows."""
        head = f"{self.dtype}{list(self.shape)}".encode()
        return blake3(head + root_of(self.rows or self.blocks)).hexdigest()[:32]

    def row(self, at: int) -> bytes:
        """Return the hash of a row."""
        return self.rows[SIZE * at : SIZE * (at + 1)]

    def narrow(self, start: int, stop: int) -> RowDigests:
        """Return the digests of some rows."""
        shape = (stop - start, *self.shape[1:])
        width = len(self.blocks) // max(self.count, 1)
        return RowDigests(
            self.dtype,
            shape,
            self.rows[SIZE * start : SIZE * stop],
            self.blocks[width * start : width * stop],
        )


def digest_rows(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, columns_of: int | None = None
) -> RowDigests:
    """Return the hashes of a tensor's rows; see [Note: a hash per row].

    Args:
        tensor: A weight. A vector has one row per element, so that a fused bias has the rows of its parts.
        dtype: Convert to this dtype first: that of the engine, for the trainer's fp32 weights.
        columns_of: The columns of the whole, where this is a shard of columns of a matrix.

    Returns:
        The digests.

    Raises:
        ArgumentError: If the columns of a shard are not whole blocks.

    Example:
        >>> from isobit.comparing.checkpoints.row_digests import digest_rows, join_digests
        >>> q, k = torch.randn(4, 6), torch.randn(2, 6)
        >>> fused = digest_rows(torch.cat([q, k]))
        >>> join_digests([digest_rows(q), digest_rows(k)]).digest == fused.digest
        True
        >>> halves = [digest_rows(part, columns_of=6) for part in q.chunk(2, 1)]
        >>> join_digests(halves, dim=1).digest == digest_rows(q).digest
        True
    """
    data = tensor.detach() if dtype is None else tensor.detach().to(dtype)
    name, shape = str(data.dtype).removeprefix("torch."), tuple(data.shape)
    rows = shape[0] if shape else 1
    flat = as_integers(data.cpu()).reshape(rows, -1) if data.numel() else None
    columns = 1 if not shape else int(torch.Size(shape[1:]).numel())
    whole = columns if columns_of is None else columns_of
    block = max(whole // parts_of(whole), 1) if whole else 1
    if columns_of is not None and (len(shape) != 2 or columns % block or whole % max(columns, 1)):
        raise ArgumentError(
            expected=f"a shard of whole blocks of {block} columns, of a matrix with {whole}",
            received=f"shape {list(shape)}",
            remedy=f"cut the columns into a power of two of shards, at most {parts_of(whole)}",
        )
    hashes = hash_blocks(flat, columns // block if columns else 0, name)
    if columns_of is not None and columns != whole:
        return RowDigests(name, shape, b"", hashes)
    return RowDigests(name, shape, hash_runs(hashes, rows), b"")


def hash_blocks(flat: torch.Tensor | None, parts: int, dtype: str) -> bytes:
    """Return the hashes of the blocks of each row [rows, columns], row by row."""
    if flat is None or not parts:
        return b""
    size = flat.numel() * flat.element_size()
    # Reads the tensor's memory directly: no copy, and NumPy is not needed.
    memory = memoryview((ctypes.c_char * size).from_address(flat.data_ptr())).cast("B")
    width = size // (flat.shape[0] * parts)
    head = dtype.encode()
    found = []
    for at in range(0, size, width):
        hasher = blake3(head)
        hasher.update(memory[at : at + width])
        found.append(hasher.digest(SIZE))
    return b"".join(found)


def hash_runs(hashes: bytes, rows: int) -> bytes:
    """Return the hash of each row's run of hashes."""
    width = len(hashes) // max(rows, 1)
    return b"".join(
        blake3(hashes[at * width : (at + 1) * width]).digest(SIZE) for at in range(rows)
    )


def root_of(rows: bytes) -> bytes:
    """Return the root of the balanced binary tree over hashes: neighbours first; an odd one out moves up."""
    level = [rows[at : at + SIZE] for at in range(0, len(rows), SIZE)]
    while len(level) > 1:
        pairs = [blake3(level[i] + level[i + 1]).digest(SIZE) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0] if level else b""


def join_digests(parts: Sequence[RowDigests], dim: int = 0) -> RowDigests:
    """Return the digests of tensors put together, without their values.

    Args:
        parts: Digests of the parts, in order.
        dim: 0 for shards of rows and for fused weights; 1 for shards of columns, made with `columns_of=`.

    Returns:
        The digests of the whole.

    Raises:
        ArgumentError: If dtypes or shapes do not fit, or shards of columns have no blocks.
    """
    if len(parts) == 1 and not parts[0].blocks:
        return parts[0]
    rests = {(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts}
    if len({p.dtype for p in parts}) != 1 or len(rests) != 1:
        shown = ", ".join(f"{p.dtype}{list(p.shape)}" for p in parts)
        raise ArgumentError(
            expected=f"parts of one dtype that fit together along dimension {dim}",
            received=shown,
            remedy="join the shards of one tensor",
        )
    total = sum(p.shape[dim] for p in parts)
    shape = (*parts[0].shape[:dim], total, *parts[0].shape[dim + 1 :])
    if dim == 0:
        return RowDigests(
            parts[0].dtype,
            shape,
            b"".join(p.rows for p in parts),
            b"".join(p.blocks for p in parts),
        )
    if not all(p.blocks for p in parts):
        raise ArgumentError(
            expected="shards of columns whose blocks were hashed",
            received="digests of rows",
            remedy="make them by digest_rows(shard, columns_of=columns of the whole)",
        )
    widths = [len(p.blocks) // p.shape[0] for p in parts]
    rows = [
        b"".join(p.blocks[w * at : w * (at + 1)] for p, w in zip(parts, widths, strict=True))
        for at in range(shape[0])
    ]
    return RowDigests(parts[0].dtype, shape, hash_runs(b"".join(rows), shape[0]))
