"""Names of bytes: parts of a 16-bit half. See [Note: halves] in names.py."""

from __future__ import annotations

import numpy as np

from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Names

# half made of two bytes -> its bytes. Forgotten when it grows: then a byte of the half gets a name
# of its own, which is sound (equal names stay equal values) but may tell equal values apart.
_BYTES: dict[int, tuple[int, int]] = {}
BYTES_KEPT = 1 << 20


def byte_of(half: Names, which: int) -> Names:
    """Return the names of the lower (0) or the upper (1) bytes of halves.

    A byte of a constant is a constant of 16 bits.
    """
    half = np.asarray(half)
    made = np.where(
        half >= nm.FIXED,
        nm.constant16((half >> np.uint64(8 * which)) & np.uint64(0xFF)),
        nm.make("byte", half, np.uint64(which)),
    )
    if _BYTES:
        for at in np.flatnonzero([int(each) in _BYTES for each in half.reshape(-1)]):
            made.reshape(-1)[at] = _BYTES[int(half.reshape(-1)[at])][which]
    return np.asarray(made)


def half_of_bytes(low: Names, high: Names) -> Names:
    """Return the halves that two bytes make."""
    fixed = nm.is_constant(low & high)
    value = ((high & np.uint64(0xFF)) << np.uint64(8)) | (low & np.uint64(0xFF))
    made = np.where(fixed, nm.FIXED | value, nm.VALUE | nm.make("bytes", low, high))
    if len(_BYTES) > BYTES_KEPT:
        _BYTES.clear()
    flat = zip(made.reshape(-1), low.reshape(-1), high.reshape(-1), strict=True)
    for half, first, second in flat:
        if half < nm.FIXED:
            _BYTES[int(half)] = (int(first), int(second))
    return np.asarray(made)
