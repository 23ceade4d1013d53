"""Names of maxima and minima as sets, so that neither order nor grouping nor repetition shows.

[Note: maxima]
max(max(a, b), c), max(a, max(b, c)) and max(max(a, c), max(b, c)) have the same bits for all
inputs, so they must have one name. The name of a maximum is a hash of the sum of the hashes of its
distinct members; a side table keeps the members of each name, so that two maxima can be united
without counting a member twice.

Why this is exact (PTX ISA, max and min): `max.f32` returns the operand that is not NaN, a canonical
NaN if both are, and +0 for +0 and -0; `max.NaN.f32` returns a canonical NaN if either is NaN. Both
are associative, commutative and idempotent on such results. max(a, a) is not `a` (a NaN of another
payload becomes canonical), so a set of one member differs from the member.
The constant -inf is dropped from a set of `max.NaN`, where it never decides. It stays in a set of
`max.f32`: max(NaN, -inf) is -inf, and the maximum of NaN alone is NaN.

A maximum is a number or the canonical NaN, so m * 1 and m + -0 are m in every bit. LLVM has both where it puts a
maximum beside a sum into one instruction of two lanes (`f32x2`, sm_100): the sum is x * a + y * b, and its neighbour
becomes m * 1 + -0 * 1. Of other values this is not so: x * 1 makes a NaN canonical.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Names

KEPT = 1 << 24  # members in the side table before it is forgotten
LARGEST = 1 << 16  # members of one set; a larger one is named by its operands in order
ONE, MINUS_ZERO = nm.constant_float(1.0), nm.constant_float(-0.0)
NEUTRAL = {"mul": ONE, "add": MINUS_ZERO}  # the operand that leaves a maximum as it is
LEAST = {"max": nm.constant_float(float("-inf")), "min": nm.constant_float(float("inf"))}


class Sets:
    """The members of each maximum and minimum that has been named.

    Forgetting members is sound: an unknown maximum is then a member itself, which may tell equal
    values apart but never makes different values equal.
    """

    def __init__(self) -> None:
        self.members: dict[tuple[str, int], Names] = {}
        self.operations: set[str] = set()
        self.kept = 0

    def join(self, operation: str, operands: Sequence[Names]) -> Names:
        """Return the names of the maximum (or minimum) of operands.

        Args:
            operation: "max", "min" or a variant such as "max.NaN"; variants do not mix.
            operands: arrays of names of one shape.
        """
        self.operations.add(operation)
        arrays = np.broadcast_arrays(*operands)
        shape = arrays[0].shape
        columns = np.stack([each.reshape(-1) for each in arrays])
        columns, back = np.unique(columns, axis=1, return_inverse=True)
        made = np.empty(columns.shape[1], np.uint64)
        for i, column in enumerate(columns.T):
            made[i] = self.name(operation, column)
        return made[back.reshape(-1)].reshape(shape)

    def unchanged(self, operation: str, operands: Sequence[Names], made: Names) -> Names:
        """Return the names of an operation of fp32, with that of a maximum where it leaves one as it is."""
        if operation not in NEUTRAL:
            return made
        for value, other in (operands, reversed(operands)):
            places = np.flatnonzero(other == NEUTRAL[operation])
            kept = [at for at in places if self.has(int(value[at]))]
            if kept:
                made = made.copy()
                made[kept] = value[kept]
        return made

    def has(self, name: int) -> bool:
        """Tell whether a name is known as that of a maximum or a minimum of fp32."""
        return any(
            (operation, name) in self.members
            for operation in self.operations
            if not operation.endswith("f16")
        )

    def name(self, operation: str, operands: Names) -> int:
        """Return the name of the maximum of a few operands."""
        parts = [self.members.get((operation, int(each))) for each in operands]
        united = np.unique(
            np.concatenate(
                [operands[i : i + 1] if part is None else part for i, part in enumerate(parts)]
            )
        )
        if ".NaN" in operation and united.size > 1:
            united = united[united != LEAST[operation.split(".")[0]]]
        with np.errstate(over="ignore"):
            key = nm.tag(f"member of {operation}")
            total = nm.mix(key, united).sum(dtype=np.uint64)
            other = nm.mix(united, key).sum(dtype=np.uint64)
        if united.size > LARGEST:
            return int(nm.make(f"{operation} of many", *np.sort(operands)))
        made = int(nm.make(f"{operation} of a set", np.uint64(united.size), total, other))
        if (operation, made) not in self.members:
            if self.kept > KEPT:
                self.members.clear()
                self.kept = 0
            self.members[operation, made] = united
            self.kept += united.size
        return made


SETS = Sets()


def maximum(a: Names, b: Names, operation: str = "max") -> Names:
    """Name the maximum of two fp32 values as a set; `operation` is the variant."""
    return SETS.join(operation, (a, b))
