"""Which tensors of two checkpoints belong together: wrappers, shards of ranks, fused and split projections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# What is compared with what: pieces of stored tensors, put together along a dimension.

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A stored tensor, or the elements from `start` to `stop` of its dimension `dim`."""

    name: str
    dim: int = 0
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        if self.start is None:
            return self.name
        return f"{self.name}[{':, ' * self.dim}{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Side:
    """One side of a comparison: pieces, put together along a dimension."""

    pieces: tuple[Piece, ...]
    dim: int = 0

    def __str__(self) -> str:
        return " + ".join(str(piece) for piece in self.pieces)


@dataclass(frozen=True)
class Pair:
    """Two sides that should be equal; `how` names the mapping, "" if the names are the same."""

    name: str
    left: Side
    right: Side
    how: str = ""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint by the names and shapes of its pieces: one, or one per rank."""

    name: str
    pieces: tuple[tuple[str, Shape], ...]
    sharded: bool = False

    def whole(self, dim: int = 0) -> Side:
        """Return all pieces, put together."""
        return Side(tuple(Piece(name) for name, _ in self.pieces), dim)


def said_without(side: str, name: str, key: str) -> str:
    """Return the sentence on which parts of a name its key lacks; "" if none."""
    if name == key:
        return ""
    rest, lost = key.split("."), []
    for part in reversed(name.split(".")):
        if rest and rest[-1] == part:
            rest.pop()
        else:
            lost.append(part)
    return f"{side} without '{'.'.join(reversed(lost))}.'"


# Fused projections: which part of `qkv_proj` is `q_proj`, also where either is sharded over ranks.
#
# A fused weight has the rows of its parts, one part after the other. Where ranks shard it, each rank has its share of
# every part, one after the other.

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
}


def pair_fused(
    pairs: list[Pair],
    left: dict[str, Tensor],
    right: dict[str, Tensor],
    remove: list[list[Tensor]],
) -> None:
    """Pair each part with its piece of a fused tensor of the other checkpoint, and remove both from what remains."""
    for swapped, (whole, parts) in enumerate(((left, right), (right, left))):
        for key, fused in list(whole.items()):
            for word, names in FUSED.items():
                path = key.split(".")
                if word not in path[-2:]:
                    continue
                at = len(path) - 1 - path[::-1].index(word)
                keys = [".".join((*path[:at], name, *path[at + 1 :])) for name in names]
                if not all(k in parts for k in keys):
                    continue
                found = cut_fused(fused, [parts[k] for k in keys])
                if found is None:
                    continue
                how = f"{word} is {' + '.join(names)} along dimension {found[0].dim}"
                said = said_without("AB"[swapped], fused.name, key)
                for k, side in zip(keys, found, strict=True):
                    part = parts.pop(k)
                    steps = (said, said_without("BA"[swapped], part.name, k), how)
                    sides = (
                        (part.whole(side.dim), side) if swapped else (side, part.whole(side.dim))
                    )
                    pairs.append(Pair(part.name, *sides, "; ".join(filter(None, steps))))
                    remove[0 if swapped else 1].remove(part)
                remove[1 if swapped else 0].remove(fused)
                del whole[key]
                break


def cut_fused(fused: Tensor, parts: list[Tensor]) -> list[Side] | None:
    """Return each part's share of a fused tensor; None if the shapes fit along no dimension."""
    shapes = [shape for tensor in (fused, *parts) for _, shape in tensor.pieces]
    ranks, dims = len(fused.pieces), len(shapes[0])
    if any(len(shape) != dims for shape in shapes):
        return None
    for dim in range(dims):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        totals = [sum(shape[dim] for _, shape in part.pieces) for part in parts]
        if len(rest) != 1 or any(total % ranks for total in totals):
            continue
        if any(shape[dim] != sum(totals) // ranks for _, shape in fused.pieces):
            continue
        edges = [sum(totals[:i]) // ranks for i in range(len(totals) + 1)]
        return [
            Side(
                tuple(Piece(name, dim, edges[i], edges[i + 1]) for name, _ in fused.pieces),
                dim,
            )
            for i in range(len(parts))
        ]
    return None


# Map the names of one checkpoint to those of another: wrappers, shards of ranks, fused and split projections.
#
# [Note: How names are mapped]
# Equal names come first. Then names are equal without the parts that wrappers add; then without a leading `model.` or
# `state_dict.`. Shards `name@0`, `name@1`, … are one tensor, put together along the only dimension that fits. Last, a
# fused projection is cut into the parts that the other checkpoint has. A mapping is used only if it is unique on both
# sides; whatever remains is in one checkpoint only. Nothing here looks at values.

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PREFIXES = ("model", "state_dict")
SHARD = re.compile(r"(.+)@(\d+)")


@dataclass
class Matching:
    """Which tensors of two checkpoints are compared.

    Attributes:
        pairs: what is compared, sorted by name.
        only_left: names that have no counterpart.
        only_right: the same of the other checkpoint.
        notes: what could not be mapped, and why.
    """

    pairs: list[Pair] = field(default_factory=list)
    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match_names(left: Mapping[str, Shape], right: Mapping[str, Shape]) -> Matching:
    """Return which tensors belong together; see [Note: How names are mapped].

    Args:
        left: Shapes by name.
        right: Shapes by name.

    Returns:
        The pairs, and what remains on either side.

    Example:
        >>> left = {"module.gate_up_proj.weight": (6, 2)}
        >>> right = {"gate_proj.weight": (3, 2), "up_proj.weight": (3, 2)}
        >>> [str(pair.left) for pair in match_names(left, right).pairs]
        ['module.gate_up_proj.weight[0:3]', 'module.gate_up_proj.weight[3:6]']
    """
    found = Matching()
    both = left.keys() & right.keys()
    found.pairs = [Pair(n, Side((Piece(n),)), Side((Piece(n),))) for n in both]
    tensors = [gather({n: s for n, s in side.items() if n not in both}) for side in (left, right)]
    for prefixes in ((), PREFIXES):
        pair_by_key(found, tensors[0], tensors[1], prefixes)
    pair_fused(found.pairs, by_key(tensors[0], PREFIXES), by_key(tensors[1], PREFIXES), tensors)
    found.pairs.sort(key=lambda pair: (pair.name, str(pair.left), str(pair.right)))
    found.only_left, found.only_right = (
        sorted(name for tensor in side for name, _ in tensor.pieces) for side in tensors
    )
    return found


def gather(shapes: Mapping[str, Shape]) -> list[Tensor]:
    """Return tensors, shards of ranks 0, 1, … as one; where a rank is missing, each shard stays by itself."""
    groups: dict[str, dict[int, str]] = {}
    for name in shapes:
        match = SHARD.fullmatch(name)
        if match and len(match.group(2)) < 10:
            groups.setdefault(match.group(1), {})[int(match.group(2))] = name
    whole = {
        name: ranks
        for name, ranks in groups.items()
        if sorted(ranks) == list(range(len(ranks))) and name not in shapes
    }
    used = {name for ranks in whole.values() for name in ranks.values()}
    found = [Tensor(name, ((name, shapes[name]),)) for name in shapes if name not in used]
    for name, ranks in whole.items():
        pieces = tuple((ranks[k], shapes[ranks[k]]) for k in sorted(ranks))
        found.append(Tensor(name, pieces, sharded=True))
    return found


def key_of(name: str, prefixes: Iterable[str]) -> str:
    """Return a name without the parts that wrappers add, and without leading prefixes."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] in prefixes:
        del parts[0]
    return ".".join(parts)


def by_key(tensors: Iterable[Tensor], prefixes: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors whose key no other tensor of the checkpoint has."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key_of(tensor.name, prefixes), []).append(tensor)
    return {key: group[0] for key, group in groups.items() if len(group) == 1}


def pair_by_key(
    found: Matching, left: list[Tensor], right: list[Tensor], prefixes: tuple[str, ...]
) -> None:
    """Pair the tensors whose keys are equal, and remove them from both lists."""
    ours, others = by_key(left, prefixes), by_key(right, prefixes)
    for key in sorted(ours.keys() & others.keys()):
        one, other = ours[key], others[key]
        how = [said_without("A", one.name, key), said_without("B", other.name, key)]
        pairs = pair_shards(one, other)
        if pairs is None:
            shapes = [", ".join(str(list(s)) for _, s in t.pieces) for t in (one, other)]
            found.notes.append(
                f"{one.name} ({shapes[0]}) and {other.name} ({shapes[1]}) fit along no dimension"
            )
            continue
        for pair in pairs:
            steps = "; ".join(word for word in (*how, pair.how) if word)
            found.pairs.append(Pair(pair.name, pair.left, pair.right, steps))
        left.remove(one)
        right.remove(other)


def pair_shards(left: Tensor, right: Tensor) -> list[Pair] | None:
    """Return the comparisons of two tensors of which either may be sharded; None if shapes fit nowhere."""
    a, b = left.pieces, right.pieces
    name = left.name
    if not left.sharded and not right.sharded:
        return [Pair(name, left.whole(), right.whole())]
    if [s for _, s in a] == [s for _, s in b] and left.sharded and right.sharded:
        return [
            Pair(f"{name}@{k}", Side((Piece(x),)), Side((Piece(y),)), "shard by shard")
            for k, ((x, _), (y, _)) in enumerate(zip(a, b, strict=True))
        ]
    shapes = {s for _, s in (*a, *b)}
    if len(shapes) == 1:  # every rank has the whole tensor
        pairs = [(a[0], y) for y in b] + [(x, b[0]) for x in a[1:]]
        return [
            Pair(name, Side((Piece(x),)), Side((Piece(y),)), "each rank has the whole tensor")
            for (x, _), (y, _) in pairs
        ]
    for dim in range(len(a[0][1])):
        totals = [joined_shape([s for _, s in pieces], dim) for pieces in (a, b)]
        if totals[0] is not None and totals[0] == totals[1]:
            how = " and ".join(
                f"{len(t.pieces)} shards of {word} joined along dimension {dim}"
                for word, t in (("A", left), ("B", right))
                if t.sharded
            )
            return [Pair(name, left.whole(dim), right.whole(dim), how)]
    return None


def joined_shape(shapes: list[Shape], dim: int) -> Shape | None:
    """Return the shape of tensors put together along a dimension; None if they do not fit."""
    if any(dim >= len(shape) for shape in shapes):
        return None
    rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(rest) != 1:
        return None
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
