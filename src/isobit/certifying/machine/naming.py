"""How an opcode names its results: the operation, whether its operands have an order, folding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isobit.certifying.names import names as nm
from isobit.certifying.names.maxima import SETS
from isobit.certifying.names.names import Array, Names

COMMUTATIVE = ("add", "mul", "fma")  # stems whose first two operands may be exchanged


class Naming:
    """Names the results of one operation.

    Args:
        operation: its name, with everything that changes bits.
        commutative: whether the first two operands may be exchanged.
        folds: whether a result of constants is a constant. False for approximations, whose bits
            are not known.
    """

    def __init__(self, operation: str, commutative: bool | None = None, folds: bool = True) -> None:
        self.operation, self.folds = operation, folds
        stem = operation.split(".")[0]
        self.commutative = stem in COMMUTATIVE if commutative is None else commutative

    def __call__(self, operands: Sequence[Names], bits: Array | None = None) -> Names:
        """Return the names of 32-bit results; `bits` are the results, for constants."""
        given = list(operands)
        if self.commutative:
            given[:2] = nm.ordered(given[0], given[1])
        return nm.make(self.operation, *given, folded=bits if self.folds else None)

    def halves(self, made: Names, operands: Sequence[Names], bits: Array) -> Names:
        """Return the halves of 16-bit results with these names."""
        if not self.folds:
            return nm.half16(made)
        fixed = np.logical_and.reduce([nm.is_constant(each) for each in operands])
        return np.where(fixed, nm.fixed_half(bits), nm.half16(made))


class SetNaming(Naming):
    """Names a maximum or a minimum by the set of its operands."""

    def __call__(self, operands: Sequence[Names], bits: Array | None = None) -> Names:
        """Return the names of the sets; a set of constants is their maximum."""
        made = SETS.join(self.operation, operands)
        if bits is None:
            return made
        fixed = np.logical_and.reduce([nm.is_constant(each) for each in operands])
        return np.where(fixed, nm.constant(bits), made) if fixed.any() else made
