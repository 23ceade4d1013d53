"""Hashes of 61 bits, from which names are made; see [Note: names] in names.py."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Names = npt.NDArray[np.uint64]
U64 = np.uint64

CONSTANT = U64(1 << 61)
HASH = U64((1 << 61) - 1)

_FIRST, _SECOND = U64(0xBF58476D1CE4E5B9), U64(0xD6E8FEB86659FD93)
_STEP, _START = U64(0x94D049BB133111EB), U64(0x9E3779B97F4A7C15)
_S29, _S32, _S61, _S62 = U64(29), U64(32), U64(61), U64(62)


def mix(*parts: Array | np.uint64, start: np.uint64 = _START) -> Names:
    """Hash parts in their order to 61 bits; arrays broadcast."""
    return np.asarray(hash_parts(start, parts) & HASH)


def hash_parts(start: Any, parts: tuple[Array | np.uint64, ...]) -> Any:
    """Hash parts in their order to 64 bits, from a state."""
    state = start
    with np.errstate(over="ignore"):
        for part in parts:
            state = state ^ part
            state *= _FIRST  # in place from here on: the first line made a new array
            state += _STEP
            state ^= state >> _S29
            state *= _SECOND
            state ^= state >> _S32
    return state


@functools.cache
def tag(operation: str) -> np.uint64:
    """Return the number that stands for an operation in a hash."""
    digest = hashlib.blake2b(operation.encode(), digest_size=8).digest()
    number: np.uint64 = np.uint64(int.from_bytes(digest, "big"))
    return number


@functools.cache
def start_of(operation: str) -> np.uint64:
    """Return the state of a hash after the operation."""
    start: np.uint64 = np.uint64(hash_parts(_START, (tag(operation),)))
    return start


def is_constant(name: Array | np.uint64) -> Array:
    """Tell which names are constants."""
    return np.asarray((name >> _S61) & U64(1)).astype(bool)


def ordered(a: Array | np.uint64, b: Array | np.uint64) -> tuple[Array, Array]:
    """Return two operands in the order that a commutative operation is named with."""
    return np.minimum(a, b), np.maximum(a, b)
