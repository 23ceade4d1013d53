"""Names of the steps of a tensor core, whose products have no order."""

from __future__ import annotations

import numpy as np

from isobit.compiled.names import U64, Names, hash64, make, start_of


def dot(a: Names, b: Names, c: Names, engine: str, dtype: str) -> Names:
    """Name one fused step of a tensor core: products of a and b over the last axis, and c.

    The products have no order and no side: the name has two sums over k, modulo 2**64, of products
    of hashes. Different sets of products are different polynomials in the hashes, so that both sums
    agree by chance with a probability below 2**-100.
    """
    sums = [np.einsum("...k,...k->...", x, y) for x, y in zip(powers(a), powers(b), strict=True)]
    return make(f"dot {engine} {dtype}", *sums, c)


def dot_tile(a: Names, b: Names, c: Names, engine: str, dtype: str, products: int) -> Names:
    """Name a chain of fused steps: a [..., m, k], b [..., n, k], c [..., m, n]."""
    return dot_chain(powers(a), powers(b), c, f"dot {engine} {dtype}", products)


def dot_chain(
    a: tuple[Names, Names], b: tuple[Names, Names], c: Names, operation: str, products: int
) -> Names:
    """Name a chain of fused steps from the `powers` of its operands."""
    for k in range(0, a[0].shape[-1], products):
        sums = [
            np.einsum("...mk,...nk->...mn", x[..., k : k + products], y[..., k : k + products])
            for x, y in zip(a, b, strict=True)
        ]
        c = make(operation, *sums, c)
    return c


def powers(name: Names) -> tuple[Names, Names]:
    """Return two hashes of 64 bits of names, for the products of `dot`."""
    with np.errstate(over="ignore"):
        first = np.asarray(hash64(start_of("product"), (name,)))
        second = (first ^ (first >> U64(31))) * U64(0x9FB21C651E98DF25)
        return first, second ^ (second >> U64(29))
