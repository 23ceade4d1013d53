"""Compare the weights of two programs by digests: which tensor is missing, stale, half-written or wrong."""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from isobit.bits import as_integers
from isobit.comparing.checkpoints.names import Side, match_names
from isobit.errors import ArgumentError, RotaryWarning

# Digests of weights that do not depend on how they are fused or sharded: a hash per row, and a tree
# over rows.
#
# [Note: a hash per row] A row is cut into `parts_of(columns)` equal blocks of columns. Each block
# has a BLAKE3 hash, a
# row the hash of its blocks' hashes, and a tensor the root of the balanced tree over its rows. So
#
# - a fused weight (`qkv_proj`) has the rows of its parts, and a part the rows that the fused one
#   has at its place;
# - shards along rows have the rows of the whole; shards along columns have whole blocks of its
#   rows, if their number divides `parts_of(columns)`, at most 8.
#
# Whoever has only a part computes hashes of its own rows or blocks, and joins them with those of
# others: by construction the digest is that of the whole. Rows are hashed as they are stored;
# `dtype=` converts first, as a weight sync does.

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
        >>> from isobit.comparing.checkpoints.weight_digests import digest_rows, join_digests
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


# Warn of rotary frequencies that were rounded: `model.to(torch.bfloat16)` casts buffers, too.
#
# A checkpoint does not contain these buffers. Whoever loads it computes them in fp32, so that a model whose own were
# rounded has other log-probabilities than the engine that loads its weights, and no digest of weights shows it.

NAME = "inv_freq"
MARK = (
    "_isobit_rounded_frequencies"  # on a module that was warned of, or whose rounding is accepted
)


def warn_of_rounded_frequencies(model: torch.nn.Module, name: str = "model") -> None:
    """Warn, once per module, of frequencies that are not fp32, by their names; `name` is what to call the model."""
    for path, module in model.named_modules():
        held = {key: module._buffers[key] for key in names_of_frequencies(module)}
        rounded = [k for k, v in held.items() if v is not None and v.dtype != torch.float32]
        if not rounded or MARK in module.__dict__:
            continue
        key = rounded[0]
        dtype = str(module._buffers[key].dtype)[6:]
        module.__dict__[MARK] = True
        place = f"{name}.{path}" if path else name
        warnings.warn(
            f"isobit: {place}.{key} is {dtype}, expected float32. model.to(dtype) rounds the "
            "rotary frequencies, which no checkpoint contains: an engine that loads the weights computes them in fp32, "
            "and its log-probabilities differ. Load the model by from_pretrained(..., dtype=...) or "
            f"from_config(..., dtype=...), or restore them before enabling: "
            f"{place} = type({place})(model.config)",
            RotaryWarning,
            stacklevel=3,
        )


def accept_rounded_frequencies(model: torch.nn.Module) -> None:
    """Do not warn of a model that is compared with itself alone."""
    for module in model.modules():
        if names_of_frequencies(module):
            module.__dict__[MARK] = True


def names_of_frequencies(module: torch.nn.Module) -> list[str]:
    """Return the buffers that are frequencies: one, or one for each kind of layer."""
    return [key for key in module._buffers if key.endswith(NAME) and "original" not in key]


VERSION = 1
RPC = "isobit_weight_digests"  # the method of isobit's vLLM worker that returns them
Digests = Mapping[str, RowDigests]


@dataclass(frozen=True)
class WeightDifference:
    """A tensor in which a receiver differs from the sender.

    Attributes:
        name: Its name on the sender's side.
        kind: missing, extra, dtype, shape, stale, half-written or wrong.
        detail: What was found.
        rows: How many rows differ.
        of: How many rows it has.
    """

    name: str
    kind: str
    detail: str
    rows: int = 0
    of: int = 0


@dataclass(frozen=True)
class WeightComparison:
    """What comparing two sets of digests found.

    Attributes:
        tensors: How many tensors were compared.
        rows: How many rows were compared.
        differences: The tensors that differ.
    """

    tensors: int
    rows: int
    differences: tuple[WeightDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.tensors > 0 and not self.differences


def digest_weights(
    weights: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    columns_of: Mapping[str, int] | None = None,
) -> dict[str, RowDigests]:
    """Return the digests of a model's weights by name.

    Args:
        weights: A module, or tensors by name. Shards of rank r of a tensor are named `name@r`.
        dtype: Convert floating-point tensors to this dtype first.
        columns_of: For each shard of columns, the columns of the whole.

    Returns:
        Digests by name.

    Example:
        >>> from isobit.comparing.checkpoints.weight_digests import compare_weights, digest_weights
        >>> q, k, v = torch.randn(4, 8), torch.randn(2, 8), torch.randn(2, 8)
        >>> engine = digest_weights({"qkv_proj.weight": torch.cat([q, k, v])})
        >>> trainer = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
        >>> compare_weights(engine, digest_weights(trainer)).equal
        True
    """
    if isinstance(weights, torch.nn.Module):
        warn_of_rounded_frequencies(weights)
        weights = weights.state_dict()
    given = columns_of or {}
    return {
        name: digest_rows(
            tensor,
            dtype=dtype if tensor.is_floating_point() else None,
            columns_of=given.get(name),
        )
        for name, tensor in weights.items()
    }


def compare_weights(
    receiver: Digests, sender: Digests, *, previous: Digests | None = None, tied: bool = True
) -> WeightComparison:
    """Compare the weights that a program received with those that were sent.

    Args:
        receiver: Digests of the engine's weights, under its names: fused, sharded or whole.
        sender: Digests of the trainer's weights.
        previous: Digests of what was sent before, to tell stale weights from wrong ones.
        tied: Do not report a head that only one side lists, where it has the other's embedding's rows.

    Returns:
        Which tensors differ, and how.

    Raises:
        ArgumentError: If there is nothing to compare.

    Example:
        >>> sent, got = torch.zeros(4, 2), torch.zeros(4, 2)
        >>> got[2:] = 1
        >>> digests = [isobit.rollout.digest_weights({"w": tensor}) for tensor in (got, sent)]
        >>> isobit.rollout.compare_weights(*digests).differences[0].detail
        'rows 2 to 4 of 4 differ, and the others are equal'
    """
    shapes = [{name: one.shape for name, one in side.items()} for side in (receiver, sender)]
    matching = match_names(*shapes)
    if not matching.pairs:
        raise ArgumentError(
            expected="weights with names in common, also fused or sharded",
            received=f"{len(receiver)} and {len(sender)} tensors, of which none fit",
            remedy="pass digests of the same model; shards of rank r are named name@r",
        )
    found, rows = [], 0
    for pair in matching.pairs:
        mine, theirs = assemble(pair.left, receiver), assemble(pair.right, sender)
        rows += theirs.count
        before = None if previous is None else assembled_or_none(pair.right, previous)
        difference = difference_of(str(pair.right), mine, theirs, before)
        if difference is not None:
            found.append(difference)
    for kind, names, here, there in (
        ("extra", matching.only_left, receiver, sender),
        ("missing", matching.only_right, sender, receiver),
    ):
        for name in names:
            if not (tied and is_tied(here[name], there)):
                found.append(
                    WeightDifference(name, kind, f"in one program only: {here[name].shape}")
                )
    return WeightComparison(len(matching.pairs), rows, tuple(found))


def assemble(side: Side, digests: Digests) -> RowDigests:
    """Return the digests of pieces put together."""
    parts = []
    for piece in side.pieces:
        one = digests[piece.name]
        if piece.start is not None and piece.stop is not None:
            if piece.dim:
                raise ArgumentError(
                    expected="fused weights that are put together along rows",
                    received=f"{piece}, along dimension {piece.dim}",
                    remedy="transpose it first",
                )
            one = one.narrow(piece.start, piece.stop)
        parts.append(one)
    return join_digests(parts, side.dim)


def assembled_or_none(side: Side, digests: Digests) -> RowDigests | None:
    """Return `assemble`, or None where a piece is not there."""
    known = all(piece.name in digests for piece in side.pieces)
    return assemble(side, digests) if known else None


def difference_of(
    name: str, mine: RowDigests, theirs: RowDigests, before: RowDigests | None
) -> WeightDifference | None:
    """Return how two tensors differ, or None."""
    if mine.shape != theirs.shape:
        detail = f"{list(mine.shape)} where {list(theirs.shape)} was sent"
        return WeightDifference(name, "shape", detail)
    if mine.dtype != theirs.dtype:
        return WeightDifference(name, "dtype", f"{mine.dtype} where {theirs.dtype} was sent")
    if mine.rows == theirs.rows:
        return None
    count = theirs.count
    apart = [at for at in range(count) if mine.row(at) != theirs.row(at)]
    old = before is not None and all(mine.row(at) == before.row(at) for at in apart)
    span = f"rows {apart[0]} to {apart[-1] + 1} of {count}"
    if len(apart) < count and len(apart) == apart[-1] - apart[0] + 1 and (old or before is None):
        what = "have the weights sent before" if old else "differ, and the others are equal"
        return WeightDifference(name, "half-written", f"{span} {what}", len(apart), count)
    if old:
        detail = f"{len(apart)} of {count} rows have the weights sent before"
        return WeightDifference(name, "stale", detail, len(apart), count)
    detail = f"{len(apart)} of {count} rows differ, between {span}"
    return WeightDifference(name, "wrong", detail, len(apart), count)


def is_tied(one: RowDigests, others: Digests) -> bool:
    """Return whether another program has the same tensor under another name, of two rows or more."""
    return one.count > 1 and any(other == one for other in others.values())


# ---- as JSON ----------------------------------------------------------------------------------------------


def digests_to_json(digests: Digests) -> str:
    """Return digests as JSON, for the other program."""
    tensors = {
        name: {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "digest": one.digest,
            "rows": one.rows.hex(),
            "blocks": one.blocks.hex(),
        }
        for name, one in digests.items()
    }
    return json.dumps({"isobit_weight_digests": VERSION, "tensors": tensors})


def digests_from_json(text: str) -> dict[str, RowDigests]:
    """Read digests, and check that each tensor's digest is that of its rows.

    Raises:
        ArgumentError: If it is not such JSON, or a digest is not that of its rows.
    """
    try:
        read = json.loads(text)
        version, tensors = read["isobit_weight_digests"], read["tensors"]
        found = {name: one_from_json(entry) for name, entry in tensors.items()}
        claimed = {name: entry["digest"] for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(
            expected="JSON that digests_to_json wrote",
            received=f"{type(error).__name__}: {error}",
            remedy="write it by isobit.comparing.checkpoints.weight_digests.digests_to_json",
        ) from error
    wrong = [name for name, one in found.items() if one.digest != claimed[name]]
    if version != VERSION or wrong:
        raise ArgumentError(
            expected=f"version {VERSION}, with digests of their rows",
            received=f"version {version}; {len(wrong)} tensors whose digest is another: {wrong[:3]}",
            remedy="write the digests again",
        )
    return found


def one_from_json(entry: dict[str, Any]) -> RowDigests:
    """Read one tensor's digests."""
    rows, blocks = bytes.fromhex(entry["rows"]), bytes.fromhex(entry["blocks"])
    return RowDigests(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), rows, blocks)
