"""Faults of ranks and messages: crashes, stalls, lost messages, bit flips, NaN."""

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
    """A fault of one rank at one of its communication calls.

    Attributes:
        rank: The rank.
        call: The number of its communication call, from 1.

    Example:
        >>> from isobit.simulator import Drop, Fault
        >>> isinstance(Drop(rank=1, call=3), Fault)
        True
    """

    rank: int
    call: int = 1


@dataclass(frozen=True)
class Die(Fault):
    """The rank crashes: it makes no further call and takes part in none.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.errors import RankLostError
        >>> from isobit.simulator import Die, World
        >>> try:
        ...     World(3, faults=[Die(rank=1)]).run(lambda rank: dist.barrier())
        ... except RankLostError as error:
        ...     print(error.ranks)
        (1,)
    """


@dataclass(frozen=True)
class Stall(Fault):
    """The rank stops before the call, for `seconds` of virtual time or, if None, forever.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.simulator import Stall, World
        >>> result = World(2, faults=[Stall(rank=1, seconds=5.0)]).run(lambda rank: dist.barrier())
        >>> min(result.clocks) > 5_000_000  # microseconds: both ranks waited
        True
    """

    seconds: float | None = None


@dataclass(frozen=True)
class Straggle(Fault):
    """The rank computes `factor` times slower from the call on.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.simulator import Straggle, World
        >>> def program(rank):
        ...     for _ in range(100):
        ...         dist.barrier()
        >>> slow = World(2, faults=[Straggle(rank=1, factor=100.0)]).run(program)
        >>> slow.clocks[0] > World(2).run(program).clocks[0]
        True
    """

    factor: float = 10.0


@dataclass(frozen=True)
class Drop(Fault):
    """The data that the rank sends in the call is lost.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.errors import DeadlockError
        >>> from isobit.simulator import Drop, World
        >>> try:
        ...     World(3, faults=[Drop(rank=2)]).run(lambda rank: dist.barrier())
        ... except DeadlockError as error:
        ...     print(error.ranks)
        (2,)
    """


@dataclass(frozen=True)
class Flip(Fault):
    """One bit of the data that the rank sends in the call is flipped in transit.

    Attributes:
        element: The flat index of the element.
        bit: The bit of the element; 0 is the lowest.
        to: The only rank that receives the flipped bit; None for all. For a sum, the result is flipped.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from isobit.simulator import Flip, World
        >>> def program(rank):
        ...     x = torch.ones(1)
        ...     dist.broadcast(x, 0)
        ...     return x.item()
        >>> World(3, faults=[Flip(rank=0, bit=31, to=2)]).run(program).values
        [1.0, 1.0, -1.0]
    """

    element: int = 0
    bit: int = 0
    to: int | None = None


@dataclass(frozen=True)
class PlantNaN(Fault):
    """One element of the data that the rank sends in the call becomes NaN, also in its own memory.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from isobit.errors import NonFiniteError
        >>> from isobit.simulator import PlantNaN, World
        >>> try:
        ...     World(3, faults=[PlantNaN(rank=1)], watch=("finite",)).run(
        ...         lambda rank: dist.all_reduce(torch.ones(1)))
        ... except NonFiniteError as error:
        ...     print(error.ranks)
        (1,)
    """

    element: int = 0


class Stalled:
    """The wait of a rank that a fault has stopped forever."""

    def describe(self) -> str:
        """Return the wait in words."""
        return "a stall that a fault planted"

    def missing(self) -> Sequence[int]:
        """Return nobody: no rank can end this wait."""
        return ()


KINDS: dict[str, type[Fault]] = {
    kind.__name__: kind for kind in (Die, Stall, Straggle, Drop, Flip, PlantNaN)
}


def fault_from(words: dict[str, Any]) -> Fault:
    """Build a fault from its record in a saved trace."""
    return KINDS[words["kind"]](**{name: value for name, value in words.items() if name != "kind"})


def draw_faults(
    seed: int, ranks: int, calls: int, count: int = 1, kinds: Sequence[str] = tuple(KINDS)
) -> tuple[Fault, ...]:
    """Draw random faults, each of a random rank at one of its first calls.

    Args:
        seed: Seed of the draw.
        ranks: Number of ranks.
        calls: The latest call at which a fault happens.
        count: Number of faults.
        kinds: Names of the kinds to draw from: Die, Stall, Straggle, Drop, Flip, PlantNaN.

    Returns:
        The faults, to be passed to `World`.

    Example:
        >>> from isobit.simulator import draw_faults
        >>> draw_faults(seed=3, ranks=4, calls=10, kinds=["Die"])
        (Die(rank=1, call=6),)
    """
    drawn = random.Random(seed)
    return tuple(
        KINDS[drawn.choice(list(kinds))](drawn.randrange(ranks), drawn.randrange(1, calls + 1))
        for _ in range(count)
    )


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of a contiguous tensor in place; bit 0 is the lowest of an element."""
    if not tensor.numel():
        return
    words = bits.as_integers(tensor).reshape(-1)
    width, at = words.element_size() * 8, element % words.numel()
    pattern = 1 << bit % width
    if words.dtype.is_signed and pattern >> (width - 1):
        pattern -= 1 << width
    words[at] ^= pattern


def plant_nan(tensors: Sequence[Tensor], element: int) -> None:
    """Write NaN into the first tensor of a floating-point dtype."""
    for tensor in tensors:
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            at = torch.unravel_index(torch.tensor(element % tensor.numel()), tensor.shape)
            tensor.data[at] = float("nan")
            return
