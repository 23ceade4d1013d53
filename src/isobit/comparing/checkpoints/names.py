"""Map the names of one checkpoint to those of another: wrappers, shards of ranks, fused and split projections.

[Note: How names are mapped]
Equal names come first. Then names are equal without the parts that wrappers add; then without a leading `model.` or
`state_dict.`. Shards `name@0`, `name@1`, … are one tensor, put together along the only dimension that fits. Last, a
fused projection is cut into the parts that the other checkpoint has. A mapping is used only if it is unique on both
sides; whatever remains is in one checkpoint only. Nothing here looks at values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from isobit.comparing.checkpoints.fused import pair_fused
from isobit.comparing.checkpoints.sides import Pair, Piece, Shape, Side, Tensor, said_without

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
