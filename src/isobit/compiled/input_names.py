"""Names of the elements of inputs: of their label and their index."""

from __future__ import annotations

import numpy as np

from isobit.compiled.names import U64, VALUE, Names, mix, split, tag


def inputs(label: str, count: int, bits: int) -> Names:
    """Return the halves of a buffer of `count` elements that is an input called `label`.

    Args:
        label: the name of the buffer; equal labels and indices mean the same input.
        count: elements.
        bits: of one element: 8, 16, 32 or 64.

    Returns:
        One uint64 per 16-bit half.
    """
    if bits == 32:
        return np.stack(split(input_names(label, count, bits)), -1).reshape(-1)
    return np.asarray(VALUE | input_names(label, (count * bits + 15) // 16, 16))


def input_names(label: str, count: int, bits: int) -> Names:
    """Return the names of the elements of an input; of 64 bits and 8 bits, of their halves."""
    operation = tag(f"input {label} of {bits} bits")
    return mix(operation, np.arange(count, dtype=U64))
