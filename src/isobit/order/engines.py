"""The tensor-core engines: how one instruction adds its products to the accumulator, in exact integer arithmetic.

[Note: the fused sum of a tensor core]
A matrix instruction takes L products a step. It does not round after each of them:

1. Every operand is a significand times a power of two. The exponent of a subnormal is the least normal one of its type,
   so its significand is less than 1. A product has the product of the significands and the sum of the exponents, and
   is not normalised.
2. All terms (products and accumulator on NVIDIA, products alone on CDNA3) are aligned to the largest exponent among
   them. Each keeps F fractional bits after the alignment; the bits below are cut off.
3. The aligned terms are added exactly, and the sum is rounded once to the result.

So the order inside a step does not matter, the order of the steps does. A zero has an exponent too on NVIDIA: -108 - F.
The rules and constants are those of Xie et al., "MMA-Sim: bit-accurate reference model of tensor cores and matrix
cores" (arXiv 2511.10909), which were fitted to hardware. Nobody has run them on your card before you do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The least exponent of a normal number of each operand type.
LEAST_EXPONENT = {"bf16": -126, "f16": -14, "tf32": -126, "e4m3": -6, "e5m2": -14}
LEAST_FP32 = -126
LARGEST_FP32 = 2.0**128 - 2.0**104


@dataclass(frozen=True)
class TensorCore:
    """The constants of one engine for one operand type.

    Attributes:
        fraction: Fractional bits that each term keeps after alignment (F).
        products: Products a step (L).
        result: Fractional bits of a result; fp32 has 23, the 8-bit types of Ada and Hopper return 13.
        late_accumulator: True if the products are added first, and the accumulator to their sum (CDNA3).
    """

    fraction: int
    products: int
    result: int = 23
    late_accumulator: bool = False


# engine -> operand type -> constants. The engine is named by F and by L of 16-bit operands; of 8-bit ones where it has
# only those.
TENSOR_CORES: dict[str, dict[str, TensorCore]] = {
    "tc24x8": {
        "bf16": TensorCore(24, 8),
        "f16": TensorCore(24, 8),
        "tf32": TensorCore(24, 4),
    },
    "tc25x16": {
        "bf16": TensorCore(25, 16),
        "f16": TensorCore(25, 16),
        "tf32": TensorCore(25, 8),
    },
    "cdna3": {
        "bf16": TensorCore(24, 8, late_accumulator=True),
        "f16": TensorCore(24, 8, late_accumulator=True),
        "tf32": TensorCore(24, 4, late_accumulator=True),
    },
    "tc13x16": {"e4m3": TensorCore(13, 16, 13), "e5m2": TensorCore(13, 16, 13)},
    "tc13x32": {"e4m3": TensorCore(13, 32, 13), "e5m2": TensorCore(13, 32, 13)},
    "tc25x32": {"e4m3": TensorCore(25, 32), "e5m2": TensorCore(25, 32)},
}
