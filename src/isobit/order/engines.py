"""The tensor-core engines: how one instruction adds its products to the accumulator, in exact integer arithmetic.

[Note: the fused sum of a tensor core]
A matrix instruction takes L products a step. It does not round after each of them:

1. Every operand is a significand times a power of two. The exponent of a subnormal is the least normal one of its type,
   so its significand is less than 1. A product has the product of the significands and the sum of the exponents, and
   is not normalised.
2. All terms (products and accumulator on NVIDIA, products alone on CDNA3) are aligned to the largest exponent among
   them. Each keeps F fractional bits after the alignment; the bits below are cut off.
3. The aligned terms are added exactly, and the sum is rounded once to the result.

So the order inside a step does not matter, the order of the steps does. A zero takes part in the alignment on NVIDIA.
The rules and constants are those of Xie et al., "MMA-Sim: bit-accurate reference model of tensor cores and matrix
cores" (arXiv 2511.10909), which were fitted to hardware. Nobody has run them on your card before you do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from isobit.order.addition import Branch
from isobit.order.exact_sum import round_fp32

# The least exponent of a normal number of each operand type.
LEAST_EXPONENT = {"bf16": -126, "f16": -14, "tf32": -126, "e4m3": -6, "e5m2": -14}
LEAST_FP32 = -126
# CDNA3 keeps 32 fractional bits of the sum of products, and 31 of the whole sum before it rounds.
CDNA3_SUM_FRACTION = 31
LOWEST = -1000  # below the exponent of every product

T = TypeVar("T")
Engine = Callable[["float | None", Sequence[tuple[float, float]]], float]


@dataclass(frozen=True)
class TensorCore:
    """The constants of one engine for one operand type.

    Attributes:
        fraction: Fractional bits that each term keeps after alignment (F).
        products: Products a step (L).
        zero: The exponent of a zero among the terms. CDNA3 ignores zeros.
        result: Fractional bits of a result; fp32 has 23, the 8-bit types of Ada and Hopper return 13.
        late_accumulator: True if the products are added first, and the accumulator to their sum (CDNA3).
    """

    fraction: int
    products: int
    zero: int
    result: int = 23
    late_accumulator: bool = False


# engine -> operand type -> constants. The engine is named by F and by L of 16-bit operands; of 8-bit ones where it has
# only those.
TENSOR_CORES: dict[str, dict[str, TensorCore]] = {
    "tc24x8": {
        "bf16": TensorCore(24, 8, -132),
        "f16": TensorCore(24, 8, -132),
        "tf32": TensorCore(24, 4, -132),
    },
    "tc25x16": {
        "bf16": TensorCore(25, 16, -133),
        "f16": TensorCore(25, 16, -133),
        "tf32": TensorCore(25, 8, -133),
    },
    "cdna3": {
        "bf16": TensorCore(24, 8, LOWEST, late_accumulator=True),
        "f16": TensorCore(24, 8, LOWEST, late_accumulator=True),
        "tf32": TensorCore(24, 4, LOWEST, late_accumulator=True),
    },
    "tc13x16": {"e4m3": TensorCore(13, 16, -132, 13), "e5m2": TensorCore(13, 16, -132, 13)},
    "tc13x32": {"e4m3": TensorCore(13, 32, -133, 13), "e5m2": TensorCore(13, 32, -133, 13)},
    "tc25x32": {"e4m3": TensorCore(25, 32, -133), "e5m2": TensorCore(25, 32, -133)},
}
# The engine of 16-bit operands of each GPU, by the name that Triton compiles for.
ENGINE_OF_TARGET = {
    "sm_80": "tc24x8",
    "sm_86": "tc24x8",
    "sm_87": "tc24x8",
    "sm_89": "tc24x8",
    "sm_90": "tc25x16",
    "sm_100": "tc25x16",
    "sm_120": "tc25x16",
    "gfx942": "cdna3",
}


def tensor_core(engine: str, dtype: str = "bf16") -> Engine:
    """Return an engine for one operand type: (accumulator or None, factors) -> accumulator.

    Factors are values of that type, the accumulator is a value of fp32. A NaN stands for the bits 0x7FFFFFFF.

    Args:
        engine: A name such as "tc25x16".
        dtype: The type of the operands.

    Returns:
        The function that adds one group of products.

    Example:
        >>> from isobit.order import tensor_core
        >>> ones = [(2.0**-25, 1.0)] * 8
        >>> tensor_core("tc24x8")(1.0, ones), tensor_core("tc25x16")(1.0, ones)
        (1.0, 1.000000238418579)
    """
    rule, least = TENSOR_CORES[engine][dtype], LEAST_EXPONENT[dtype]
    step = cdna3_step if rule.late_accumulator else nvidia_step

    def add(before: float | None, factors: Sequence[tuple[float, float]]) -> float:
        total = 0.0 if before is None else before
        for run in runs(factors, rule.products):
            total = step(total, run, rule, least)
        return total

    return add


def nvidia_step(
    total: float, factors: Sequence[tuple[float, float]], rule: TensorCore, least: int
) -> float:
    """Add the products and the accumulator in one fused sum, rounded toward zero."""
    terms = [a * b for a, b in factors] + [total]
    if not all(map(math.isfinite, terms)):
        return sum(term for term in terms if not math.isfinite(term))
    exponents = product_exponents(factors, least, rule.zero)
    top = max(*exponents, exponent_of(total, LEAST_FP32) if total else rule.zero)
    aligned = sum(math.trunc(math.ldexp(term, rule.fraction - top)) for term in terms)
    return cut(aligned, top - rule.fraction, rule.result)


def cdna3_step(
    total: float, factors: Sequence[tuple[float, float]], rule: TensorCore, least: int
) -> float:
    """Add the products in one fused sum, then the accumulator to it; bits are cut by rounding down after that.

    The last rounding, to fp32, is to nearest, ties to even. A product beyond the range of fp32 is an infinity.
    """
    products = [a * b for a, b in factors]
    products = [math.copysign(math.inf, p) if abs(p) >= 2.0**128 else p for p in products]
    terms = [*products, total]
    if not all(map(math.isfinite, terms)):
        return sum(term for term in terms if not math.isfinite(term))
    top = exponent_of(total, LEAST_FP32)
    kept = CDNA3_SUM_FRACTION + 1
    dot = 0
    if any(products):
        low = max(product_exponents(factors, least, rule.zero))
        dot = sum(math.trunc(math.ldexp(p, rule.fraction - low)) for p in products)
        top = max(top, low)
        dot = shift_down(dot, top - low - kept + rule.fraction)
    held = math.floor(math.ldexp(total, rule.fraction - top))
    value = dot + shift_down(held, rule.fraction - kept)  # in units of 2**(top - kept)
    own = max(value.bit_length() - 1 + top - kept, LEAST_FP32)
    drop = max(own - CDNA3_SUM_FRACTION - (top - kept), 0)
    return round_fp32(math.ldexp(value >> drop, top - kept + drop))


def cut(value: int, unit: int, fraction: int) -> float:
    """Return value * 2**unit rounded toward zero; a zero is +0, what is beyond fp32 is an infinity."""
    size = abs(value)
    own = max(size.bit_length() - 1 + unit, LEAST_FP32)
    if own > 127:
        return math.copysign(math.inf, value)
    drop = max(own - fraction - unit, 0)
    result = math.ldexp(size >> drop, unit + drop)
    return -result if value < 0 and result else result


def shift_down(value: int, places: int) -> int:
    """Return value / 2**places, rounded down; places may be negative."""
    return value >> places if places >= 0 else value << -places


def exponent_of(value: float, least: int) -> int:
    """Return the exponent of the leading bit, or of a subnormal the least normal exponent of its type."""
    return max(math.frexp(value)[1] - 1, least) if value else least


def product_exponents(
    factors: Sequence[tuple[float, float]], least: int, of_zero: int
) -> list[int]:
    """Return the exponent of each product: the sum of its factors', which does not normalise it."""
    return [
        exponent_of(a, least) + exponent_of(b, least) if a and b else of_zero for a, b in factors
    ]


def runs(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    """Yield the items of each step; the last one may have fewer."""
    for at in range(0, len(items), length):
        yield items[at : at + length]


def add_fused(engine: str, total: Branch | None, indices: Sequence[int]) -> Branch | None:
    """Return the additions of one run of bf16 or f16 products on top of `total`, one fused addition a step.

    The accumulator of the first step is +0, which no probe can see. CDNA3 adds the accumulator late, but aligned to the
    largest product, even where the products cancel: so its order is that of one fused addition too.
    """
    for run in runs(indices, TENSOR_CORES[engine]["bf16"].products):
        parts = tuple(run) if total is None else (total, *run)
        total = parts if len(parts) > 1 else parts[0]
    return total
