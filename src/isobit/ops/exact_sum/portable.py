"""The portable executor of the exact sum: mantissas collected by exponent, and Python's integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.order.exact_sum import exact_sum as sum_fp64
from isobit.order.exact_sum import round_fp32

DIGITS = 20  # of 32 bits, as csrc/exact.cpp
LOWEST = -320  # the weight of digit i is 2^(32 i + LOWEST)
STATE_SIZE = DIGITS + 3  # then how many NaN, +inf, -inf
MOST_AT_ONCE = 2**28  # values whose digits a GPU adds in int64 without a carry
LEAST_EXPONENT = -1074  # of an fp64
HALF_MANTISSA = 27


def state(tensors: Sequence[Tensor], squared: bool) -> Tensor:
    """Return a state, int64 [STATE_SIZE]; states are merged by adding them."""
    total, specials = 0, [0, 0, 0]
    for tensor in tensors:
        values = tensor.detach().reshape(-1).double()
        values = values * values if squared else values  # exact: twice 24 bits
        finite = values.isfinite()
        total += whole_sum(values[finite])
        others = (values.isnan(), values == torch.inf, values == -torch.inf)
        specials = [n + int(mask.sum()) for n, mask in zip(specials, others, strict=True)]
    digits = to_digits(total >> (LOWEST - LEAST_EXPONENT))
    return torch.tensor([*digits, *specials], dtype=torch.int64, device="cpu")


def whole_sum(values: Tensor) -> int:
    """Return the exact sum of finite fp64 values, as an integer in units of 2^LEAST_EXPONENT."""
    mantissa, exponent = torch.frexp(values)
    whole = (mantissa * 2.0**53).long()  # times 2^(exponent - 53)
    shift = exponent.long() - LEAST_EXPONENT  # 53 too many, since a subnormal's whole ends in zeros
    high, low = whole >> HALF_MANTISSA, whole & ((1 << HALF_MANTISSA) - 1)
    bins = torch.zeros(2, 2200, dtype=torch.int64, device=values.device)
    bins[0].index_add_(0, shift, high)
    bins[1].index_add_(0, shift, low)
    total = 0
    for at, (high_sum, low_sum) in enumerate(bins.t().tolist()):
        if high_sum or low_sum:
            total += ((high_sum << HALF_MANTISSA) + low_sum) << at
    return total >> 53


def to_digits(total: int) -> list[int]:
    """Split a number into DIGITS digits, all but the last in [0, 2^32)."""
    return [total >> 32 * i & 0xFFFFFFFF for i in range(DIGITS - 1)] + [total >> 32 * (DIGITS - 1)]


def round_state(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the value of a state, rounded once to fp32 or fp64."""
    *digits, nans, plus, minus = state.tolist()
    if nans or (plus and minus):
        value = math.nan
    elif plus or minus:
        value = math.inf if plus else -math.inf
    else:
        value = round_whole(sum(d << 32 * i for i, d in enumerate(digits)), dtype)
    return torch.tensor(value, dtype=dtype)


def round_whole(total: int, dtype: torch.dtype) -> float:
    """Return total · 2^LOWEST, rounded once.

    Python's division rounds correctly to fp64. For fp32 the number is first rounded to odd with 52 bits, so that the
    second rounding is correct.
    """
    if dtype == torch.float64:
        return total / (1 << -LOWEST)
    size = abs(total)
    spare = max(size.bit_length() - 52, 0)
    odd = size >> spare | bool(size & ((1 << spare) - 1))
    return round_fp32(math.copysign(math.ldexp(odd, spare + LOWEST), total))


def exact_sum(x: Tensor) -> Tensor:
    """Return the sum of all elements: in fp64 for fp64, otherwise in fp32."""
    if x.dtype == torch.float64:
        return torch.tensor(sum_fp64(x.detach().reshape(-1).tolist()), dtype=torch.float64)
    return round_state(state([x], squared=False), torch.float32)


# Compare an executor's exact sums with the portable one: digits and roundings, on hard values.

SIZES = (1, 37, 2049)


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        normal = torch.randn(size, generator=generator, dtype=torch.float32)
        x = torch.ldexp(normal, torch.randint(-140, 120, (size,), generator=generator)).to(dtype)
        x = torch.where(x.isfinite(), x, 1.0)
        for squared in (False, True):
            found = call("exact_state", [x], squared)
            if not bits.equal(found, state([x], squared)):
                return f"the exact sum of {size} {'squares' if squared else 'values'}"
            for kind in (torch.float32, torch.float64):
                if not bits.equal(call("exact_round", found, kind), round_state(found, kind)):
                    return f"the rounding of an exact sum to {kind}"
    return None


def difference_on_gpu(dtype: torch.dtype, call: Call) -> str | None:
    """Return what differs first, or None; digits are compared by what they round to, as carries are not propagated."""
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        normal = torch.randn(size, generator=generator, dtype=torch.float32)
        x = torch.ldexp(normal, torch.randint(-140, 120, (size,), generator=generator)).to(dtype)
        for given in (x, torch.where(x.isfinite(), x, 1.0)):
            if not bits.equal(call("exact_sum", given), exact_sum(given)):
                return f"the exact sum of {size} values"
            for squared in (False, True):
                states = call("exact_state", given, squared), state([given], squared)
                found, wanted = (round_state(s, torch.float64) for s in states)
                if not bits.equal(found, wanted):
                    return f"the digits of {size} {'squares' if squared else 'values'}"
    return None
