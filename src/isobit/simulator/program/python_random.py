"""Save and restore the state of Python's `random` as raw bytes; getstate and setstate are too slow for each switch.

The state follows the header of the object. This is checked once; if it is not so, getstate and setstate are used.
"""

from __future__ import annotations

import ctypes
import random
from functools import cache
from typing import Any

HEADER = object.__basicsize__
WORDS = 625  # the position, then the 624 words of the Mersenne Twister


def address_of(generator: random.Random) -> int:
    """Return where the state of a generator is expected in memory."""
    return id(generator) + HEADER


@cache
def follows_header() -> bool:
    """Return whether the state follows the header, by reading two states both ways."""
    if (
        type(random.Random.getstate).__name__ != "function"
        or random.Random.__basicsize__ < HEADER + 4 * WORDS
    ):
        return False
    for seed in (1, 2):
        generator = random.Random(seed)
        generator.random()
        words = (ctypes.c_uint32 * WORDS).from_address(address_of(generator))
        state = generator.getstate()[1]
        if (*words[1:], words[0]) != state:
            return False
    return True


def save() -> Any:
    """Return the state of the shared generator."""
    shared: Any = random._inst
    if not follows_header():
        return shared.getstate()
    return ctypes.string_at(address_of(shared), 4 * WORDS), shared.gauss_next


def restore(state: Any) -> None:
    """Set the state of the shared generator."""
    shared: Any = random._inst
    if len(state) != 2:
        shared.setstate(state)
        return
    ctypes.memmove(address_of(shared), state[0], 4 * WORDS)
    shared.gauss_next = state[1]


def seeded(seed: str) -> Any:
    """Return the state of a new generator."""
    generator = random.Random(seed)
    if not follows_header():
        return generator.getstate()
    return ctypes.string_at(address_of(generator), 4 * WORDS), None
