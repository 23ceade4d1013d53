"""What may go wrong with a rank or a message: planted by name, or drawn by seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit import bits


@dataclass(frozen=True)
class Fault:
    """Happens to `rank` at its communication call number `call`, counted from 1."""

    rank: int
    call: int = 1


@dataclass(frozen=True)
class Die(Fault):
    """The rank is gone: it makes no further call and answers none."""


@dataclass(frozen=True)
class Stall(Fault):
    """The rank stops before the call: for `seconds` of virtual time, or for good."""

    seconds: float | None = None


@dataclass(frozen=True)
class Straggle(Fault):
    """From the call on, the rank computes `factor` times slower."""

    factor: float = 10.0


@dataclass(frozen=True)
class Drop(Fault):
    """What the rank sends in the call is lost."""


@dataclass(frozen=True)
class Flip(Fault):
    """One bit of what the rank sends in the call is flipped on its way; its own copy stays whole.

    With `to`, only that rank receives it flipped (of a sum: the last hop to it is what flips the bit).
    """

    element: int = 0
    bit: int = 0
    to: int | None = None


@dataclass(frozen=True)
class PlantNaN(Fault):
    """One element of what the rank sends in the call is a NaN, in the rank's own memory as well."""

    element: int = 0


KINDS: dict[str, type[Fault]] = {
    kind.__name__: kind for kind in (Die, Stall, Straggle, Drop, Flip, PlantNaN)
}


def fault_from(words: dict[str, Any]) -> Fault:
    """The fault that a saved trace names."""
    return KINDS[words["kind"]](**{name: value for name, value in words.items() if name != "kind"})


def draw_faults(
    seed: int, ranks: int, calls: int, count: int = 1, kinds: Sequence[str] = tuple(KINDS)
) -> tuple[Fault, ...]:
    """`count` faults, each at a seeded rank and one of its first `calls` calls."""
    drawn = random.Random(seed)
    return tuple(
        KINDS[drawn.choice(list(kinds))](drawn.randrange(ranks), drawn.randrange(1, calls + 1))
        for _ in range(count)
    )


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """In place, on the raw bits of a contiguous tensor; `bit` 0 is an element's lowest."""
    if not tensor.numel():
        return
    words = bits.as_integers(tensor).reshape(-1)
    width, at = words.element_size() * 8, element % words.numel()
    pattern = 1 << bit % width
    if words.dtype.is_signed and pattern >> (width - 1):
        pattern -= 1 << width
    words[at] ^= pattern


def plant_nan(tensors: Sequence[Tensor], element: int) -> None:
    """Into the first tensor that can hold one."""
    for tensor in tensors:
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            at = torch.unravel_index(torch.tensor(element % tensor.numel()), tensor.shape)
            tensor.data[at] = float("nan")
            return
