"""Names of sums, differences, products and quotients, in which a sign has one place.

[Note: signs]
Compilers write x - n * c as x + n * (-c) and back, which are the same bits for all inputs. So the
last bit of a hash stands for a sign: h and h ^ 1 are a value and its negative. A difference is
the sum with the negative, and the sign of a product or quotient is taken out of its operands.
Arithmetic returns one NaN, whatever the signs of its operands. The instruction `neg` keeps a name
of its own, because it may change the sign of a NaN. There is no rule -(a + b) = -a - b: it is
wrong for sums that are zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from isobit.certifying.names.hashes import U64, Array, Names, is_constant, mix, ordered, start_of

_MINUS = U64(1 << 31)  # the sign bit of an fp32 constant


def _sign_bit(a: Array | np.uint64) -> Array:
    return np.asarray(np.where(is_constant(a), _MINUS, U64(1)))


def _apart(a: Array | np.uint64) -> tuple[Array, Array]:
    """Return a name without its sign, and the sign: 0 or 1."""
    bit = _sign_bit(a)
    return np.asarray(a & ~bit), np.asarray((a & bit) != 0).astype(U64)


def _add(a: Array, b: Array) -> Names:
    return mix(*ordered(a, b), start=start_of("add"))


def _sub(a: Array, b: Array) -> Names:
    return _add(a, b ^ _sign_bit(b))


def _mul(a: Array, b: Array) -> Names:
    (a, minus), (b, also) = _apart(a), _apart(b)
    return mix(*ordered(a, b), start=start_of("mul")) ^ (minus ^ also)


def _div(a: Array, b: Array) -> Names:
    (a, minus), (b, also) = _apart(a), _apart(b)
    return mix(a, b, start=start_of("div")) ^ (minus ^ also)


def _fma(a: Array, b: Array, c: Array) -> Names:
    (a, minus), (b, also) = _apart(a), _apart(b)
    return mix(*ordered(a, b), c, minus ^ also, start=start_of("fma"))


SIGNED: dict[str, Callable[..., Names]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "fma": _fma,
}
