"""Random numbers that are a function of (seed, request, position): integer arithmetic, no generator, no state.

[Note: the key of a draw] The numbers of a key are hashed one after the other by splitmix64's finaliser, whose products
wrap around in int64 as they do in uint64. So a draw is the same in any batch, on any device, and when generation is
resumed; requests that are drawn at the same time share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from blake3 import blake3
from torch import Tensor

from isobit.errors import ArgumentError

# splitmix64's constants, as int64
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15

Whole = int | Sequence[int] | Tensor


def uniform(seed: Whole, requests: Whole, positions: Whole, rows: int) -> Tensor:
    """Return one number in [0, 1) per row, a multiple of 2^-53 in fp64; see [Note: the key of a draw].

    Args:
        seed: One for all rows, or one per row.
        requests: The number of each row's request.
        positions: The position in its request of the token that is drawn.
        rows: The number of rows.

    Returns:
        Tensor [rows] in fp64, on the CPU.
    """
    key = torch.full((rows,), GOLDEN, dtype=torch.int64)
    for name, part in (("seed", seed), ("requests", requests), ("positions", positions)):
        key = mix((key ^ per_row(name, part, rows)) + GOLDEN)
    return shift_right(key, 11).double() * 2.0**-53


def per_row(name: str, value: Whole, rows: int) -> Tensor:
    """Return a key's part as int64 [rows], modulo 2^64."""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        found = value.reshape(-1).to("cpu", torch.int64) if whole else None
    else:
        given = list(value) if isinstance(value, Sequence) else [value]
        whole = all(hasattr(one, "__index__") and not isinstance(one, bool) for one in given)
        numbers = [as_int64(index(one)) for one in given] if whole else []
        found = torch.tensor(numbers, dtype=torch.int64)
    if found is None or not whole or len(found) not in (1, rows):
        raise ArgumentError(
            expected=f"{name}: a whole number, or one for each of {rows} rows",
            received=f"{type(value).__name__} of {0 if found is None else len(found)} whole numbers",
            remedy="pass integers; isobit.sampling.request_number makes one of a request's name",
        )
    return found.expand(rows)


def mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64, where products wrap around."""
    x = (x ^ shift_right(x, 30)) * FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def as_int64(value: int) -> int:
    """Convert to int64 modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63


def request_number(name: str) -> int:
    """Return the number of a request that has a name: 63 bits of its BLAKE3 digest.

    Args:
        name: The request's id, such as vLLM's `request_id`.

    Returns:
        A whole number from 0 to 2^63 - 1.

    Example:
        >>> isobit.sampling.request_number("request-7") == isobit.sampling.request_number("request-7")
        True
    """
    return int.from_bytes(blake3(name.encode()).digest(8), "little") >> 1
