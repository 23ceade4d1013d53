"""Predicates that are kept as numbers: `selp 1, 0` of a predicate, compared with zero, is the predicate again.

Triton keeps a predicate in a register of 16 or 32 bits where it has to be moved. Names are hashes and cannot be read
backwards, so the machine remembers, within a CTA, which predicate such a number stands for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from isobit.certifying.machine.predicate_names import negated
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Names
from isobit.certifying.ptx.program import Immediate, Operand

WIDTHS = (16, 32)
# In the state of a CTA: name of the number -> name of the predicate, and whether the number is 0 if it is true.
KEY = "flags"


def remember(machine: State, width: int, made: Any, guard: Names, a: Operand, b: Operand) -> None:
    """Keep the predicate of "a if predicate else b", if one of two constants is zero and the other is not."""
    if not (isinstance(a, Immediate) and isinstance(b, Immediate)) or (a.value == 0) == (
        b.value == 0
    ):
        return
    number = nm.value16(made) if width == 16 else made.value
    fresh = ~np.asarray(nm.is_constant(number))
    stands_for = [(each, a.value == 0) for each in guard[fresh].tolist()]
    machine.state.setdefault(KEY, {}).update(zip(number[fresh].tolist(), stands_for, strict=True))


def recall(machine: State, made: Names, operand: Operand, width: int, *, negate: bool) -> Names:
    """Return the names of "operand != 0" (or "== 0"), where the operand stands for a predicate."""
    known = machine.state.get(KEY)
    if not known:
        return made
    found = [known.get(name) for name in machine.one_name(operand, width).tolist()]
    stands = np.array([each is not None for each in found])
    predicate = np.array([each[0] if each else 0 for each in found], dtype=np.uint64)
    turned = np.array([bool(each and each[1]) != negate for each in found])
    return np.where(stands, np.where(turned, negated(predicate), predicate), made)
