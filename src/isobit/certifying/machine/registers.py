"""The register file: for each register the bits of all threads, and the names of what they hold.

Names of a register by its width; None means that no thread's value depends on float data:
  1 bit    one name per thread (a predicate)
  16 bits  one half per thread
  32 bits  a `Word`
  64 bits  a tuple of two `Word`s, the lower first
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from isobit.certifying.names import names as nm
from isobit.certifying.names.byte_names import byte_of
from isobit.certifying.names.names import Array, Names

UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64, 1: np.bool_}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}

_unknown = [secrets.randbits(60)]


def unknown_names(count: int) -> Names:
    """Return names that equal no other names: of what was never written."""
    start = _unknown[0]
    _unknown[0] += count
    return nm.mix(nm.tag("unknown"), np.arange(count, dtype=np.uint64) + np.uint64(start))


class Word:
    """The names of a 32-bit register: of the whole values, or of their two halves."""

    __slots__ = ("_high", "_low", "_powers", "_value", "whole")

    def __init__(
        self, value: Names | None = None, low: Names | None = None, high: Names | None = None
    ) -> None:
        self._value, self._low, self._high = value, low, high
        self._powers: dict[int, tuple[Names, Names]] = {}
        self.whole = low is None  # made from whole values, so that halves add nothing

    @classmethod
    def constant(cls, bits: Array) -> Word:
        """Return the names of constants."""
        return cls(nm.constant(bits))

    @property
    def value(self) -> Names:
        """The names of the 32-bit values."""
        if self._value is None:
            assert self._low is not None
            assert self._high is not None
            self._value = nm.join(self._low, self._high)
        return self._value

    @property
    def halves(self) -> tuple[Names, Names]:
        """The lower and the upper halves."""
        if self._low is None or self._high is None:
            self._low, self._high = nm.split(self.value)
        return self._low, self._high

    def elements(self, bits: int) -> Names:
        """Return the names of the elements of 8, 16 or 32 bits, [threads, elements]."""
        if bits == 32:
            return self.value[:, None]
        if bits == 16:
            return np.stack([nm.value16(half) for half in self.halves], -1)
        return np.stack([byte_of(half, i) for half in self.halves for i in (0, 1)], -1)

    def powers(self, bits: int) -> tuple[Names, Names]:
        """Return `nm.powers` of the elements; kept, as a fragment is used by several products."""
        if bits not in self._powers:
            self._powers[bits] = nm.powers(self.elements(bits))
        return self._powers[bits]

    def take(self, lanes: Array) -> Word:
        """Return the names that the threads `lanes` hold."""
        if self.whole:
            return Word(self.value[lanes])
        low, high = self.halves
        return Word(low=low[lanes], high=high[lanes])

    def fixed(self) -> Array:
        """Tell which threads hold a constant."""
        if self.whole:
            return nm.is_constant(self.value)
        low, high = self.halves
        return np.asarray((low & high) >= nm.FIXED)


def where(mask: Array, new: Word, old: Word) -> Word:
    """Return `new` in the threads of `mask` and `old` in the others."""
    if new.whole and old.whole:
        return Word(np.where(mask, new.value, old.value))
    (a, b), (c, d) = new.halves, old.halves
    return Word(low=np.where(mask, a, c), high=np.where(mask, b, d))


def choose(predicate: Names, new: Word, old: Word) -> Word:
    """Return the names of "new if predicate else old"."""
    if new.whole and old.whole:
        return Word(nm.select(predicate, new.value, old.value))
    (a, b), (c, d) = new.halves, old.halves
    low, high = select_half(predicate, a, c), select_half(predicate, b, d)
    one = nm.is_one_value(a, b) & nm.is_one_value(c, d)  # halves that were parted and joined again
    if one.any():
        first, second = nm.split(nm.select(predicate, new.value, old.value))
        low, high = np.where(one, first, low), np.where(one, second, high)
    return Word(low=low, high=high)


def select_half(predicate: Names, a: Names, b: Names) -> Names:
    """Return the halves of "a if predicate else b"."""
    made = nm.VALUE | nm.make("select half", predicate, a, b)
    known, true = nm.is_constant(predicate), (predicate & np.uint64(1)).astype(bool)
    return np.where(known, np.where(true, a, b), np.where(a == b, a, made))


def constant_names(bits: Array, width: int) -> Any:
    """Return the names of constants in the form of a register of this width."""
    if width == 1:
        return nm.constant_predicate(bits)
    if width == 16:
        return nm.fixed_half(bits)
    if width == 32:
        return Word.constant(bits)
    return (Word.constant(bits & np.uint64(0xFFFFFFFF)), Word.constant(bits >> np.uint64(32)))


def merge(width: int, mask: Array, guard: Names | None, new: Any, old: Any) -> Any:
    """Return the names after a write under a mask, or under a guard that depends on data."""
    if width == 64:
        return tuple(merge(32, mask, guard, a, b) for a, b in zip(new, old, strict=True))
    if width == 32:
        return where(mask, new, old) if guard is None else choose(guard, new, old)
    if guard is None:
        return np.where(mask, new, old)
    if width == 16:
        return select_half(guard, new, old)
    return nm.select(guard, new, old)


def fixed_threads(width: int, made: Any) -> Array:
    """Tell which threads hold a constant."""
    if width == 64:
        return np.asarray(made[0].fixed() & made[1].fixed())
    if width == 32:
        return np.asarray(made.fixed())
    return np.asarray(made >= nm.FIXED) if width == 16 else nm.is_constant(made)


def normal(width: int, made: Any) -> Any:
    """Return None if all threads hold constants, else the names themselves."""
    if width == 1:
        return None if nm.is_constant(made).all() else made
    if width == 16:
        return None if (made >= nm.FIXED).all() else made
    if width == 32:
        return None if made.fixed().all() else made
    return None if all(word.fixed().all() for word in made) else made


def unknown_register(width: int, threads: int) -> Any:
    """Return the names of a register that was never written."""
    if width == 64:
        return (Word(unknown_names(threads)), Word(unknown_names(threads)))
    return Word(unknown_names(threads)) if width == 32 else unknown_names(threads)


def name64(words: tuple[Word, Word]) -> Names:
    """Return one name per 64-bit value; a constant keeps the flag, with a hash of its bits."""
    low, high = words[0].value, words[1].value
    fixed = nm.is_constant(low & high)
    made = nm.pair(low, high)
    return np.where(fixed, made | nm.CONSTANT, made)


def from_names(width: int, made: Names, known: Array, bits: Array) -> Any:
    """Return names of results in the form of a register; `known` threads hold constants."""
    if width == 1:
        return np.where(known, nm.constant_predicate(bits), made)
    if width == 16:
        return np.where(known, nm.fixed_half(bits), nm.VALUE | made)
    if width == 32:
        return Word(np.where(known, nm.constant(bits), made))
    wide = bits.astype(np.uint64)
    parts = (wide & np.uint64(0xFFFFFFFF), wide >> np.uint64(32))
    return tuple(
        Word(np.where(known, nm.constant(part), nm.make("word", made, np.uint64(i))))
        for i, part in enumerate(parts)
    )
