"""Compare the weights of two programs by digests: which tensor is missing, stale, half-written or wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isobit.comparing.checkpoints.names import match_names
from isobit.comparing.checkpoints.rotary_frequencies import warn_of_rounded_frequencies
from isobit.comparing.checkpoints.row_digests import RowDigests, digest_rows, join_digests
from isobit.comparing.checkpoints.sides import Side
from isobit.errors import ArgumentError

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
