"""Fused projections: which part of `qkv_proj` is `q_proj`, also where either is sharded over ranks.

A fused weight has the rows of its parts, one part after the other. Where ranks shard it, each rank has its share of
every part, one after the other.
"""

from __future__ import annotations

from isobit.comparing.checkpoints.sides import Pair, Piece, Side, Tensor, said_without

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
