"""Names of predicates."""

from __future__ import annotations

import numpy as np

from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Names


def negated(name: Names) -> Names:
    """Return the names of "not predicate"."""
    flipped = nm.constant_predicate(1 - (name & np.uint64(1)))
    return np.where(nm.is_constant(name), flipped, nm.make("not", name))
