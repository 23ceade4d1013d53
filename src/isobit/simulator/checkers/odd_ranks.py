"""Who parted from whom: ranks grouped by what they hold, and the odd ones out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import Tensor

from isobit import bits

LARGEST_KEPT = 1 << 20
"""Elements of a tensor that is kept to say where it parted; of a larger one only the digest is."""


def group_ranks(held: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
    """Ranks that hold the same, the largest group first, then by lowest rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank in sorted(held):
        groups.setdefault(held[rank], []).append(rank)
    return sorted(
        (tuple(group) for group in groups.values()), key=lambda group: (-len(group), group)
    )


def find_odd(held: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks outside the majority; all of them where there is none, since then nobody is right by count."""
    groups = group_ranks(held)
    if 2 * len(groups[0]) > len(held):
        return tuple(sorted(rank for group in groups[1:] for rank in group))
    return tuple(sorted(held))


def say_groups(held: Mapping[int, Hashable]) -> str:
    """[0 1] [2 3]"""
    return " ".join(f"[{' '.join(map(str, group))}]" for group in group_ranks(held))


def digest(tensor: Tensor | None) -> str:
    """Of the raw bits; of a tensor that is not there, a word."""
    return "none" if tensor is None else bits.digest(tensor.detach())


def keep(tensor: Tensor) -> Tensor | None:
    """A copy, unless it is large."""
    return tensor.detach().clone() if tensor.numel() <= LARGEST_KEPT else None


def say_difference(left: Tensor | None, right: Tensor | None) -> str:
    """Where two copies part, and how far."""
    found = None if left is None or right is None else bits.first_difference(left, right)
    if found is None:
        return "somewhere"
    return f"first at {list(found.index or ())}, {found.left} against {found.right}"


def is_constant(tensor: Tensor) -> bool:
    """Whether all elements are one value: fresh biases and norm weights are, so their equality says nothing."""
    flat = tensor.detach().reshape(-1)
    return flat.numel() == 0 or bool((flat == flat[0]).all())
