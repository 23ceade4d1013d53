"""The arithmetic of a revealed order: widths of its additions, how products and subnormal numbers enter.

Equal orders with equal arithmetic give equal bits for all finite inputs, if the kernel does not branch on them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from blake3 import blake3

WIDTHS = (8, 11, 24, 53)  # significand bits of bf16, fp16, fp32, fp64
NAMES = {8: "bf16", 11: "fp16", 24: "fp32", 53: "fp64"}


@dataclass(frozen=True)
class Arithmetic:
    """What the additions of one tree do.

    The last addition cannot be separated from what is done to its result.
    """

    products: str  # "none", "exact" (the dtype's products fit the accumulator), "fused", "rounded" or "mixed"
    rounded: frozenset[int]  # the terms whose product is rounded before it is added
    widths: tuple[int, ...]  # significand bits of each addition's result, in the order of steps_of
    terms_cut_to: int | None  # significand bits of a term as it enters, if fewer than written
    cut_how: str  # "", or how that is done: "truncated" or "rounded", with ", factors too" for both sides of a product
    keeps_subnormal_terms: bool | None  # None: not observed
    keeps_subnormal_sums: bool | None
    keeps_negative_zero: bool  # whether a sum of -0.0 alone is -0.0: False if it starts from +0.0
    # Roundings of an addition whose operands are wider than its result. "": an addition of two rounds to its widest
    # operand's format first, a fused one rounds once. "through fp64": all go through fp64. "at once": all round once.
    passing: str = ""

    def __str__(self) -> str:
        """Describe the arithmetic in one line."""
        count = Counter(self.widths[:-1] or self.widths)
        (usual, _), *others = count.most_common()
        parts = [f"{NAMES[usual]} sums"]
        parts += [f"{number} additions rounded to {NAMES[width]}" for width, number in others]
        if self.products != "none":
            words = {
                "exact": "exact products",
                "fused": "products fused into the addition",
                "rounded": "products rounded first",
                "mixed": f"{len(self.rounded)} products rounded first, the others fused",
            }
            parts.append(words[self.products])
        if self.terms_cut_to is not None:
            parts.append(f"terms cut to {self.terms_cut_to} bits, {self.cut_how}")
        kept = {
            (True, True): "subnormals kept",
            (False, False): "subnormals are zero",
            (True, False): "subnormal sums are zero",
            (False, True): "subnormal terms are zero",
            (None, None): "subnormals not observed",
        }
        parts.append(kept[self.keeps_subnormal_terms, self.keeps_subnormal_sums])
        if self.keeps_negative_zero:
            parts.append("-0 kept")
        if self.passing:
            parts.append(f"rounded {self.passing}")
        return ", ".join(parts)

    @property
    def digest(self) -> bytes:
        """The BLAKE3 digest of all fields."""
        cut = self.terms_cut_to, self.cut_how
        text = repr((self.products, sorted(self.rounded), self.widths, *cut))
        subnormals = self.keeps_subnormal_terms, self.keeps_subnormal_sums
        text += repr((*subnormals, self.keeps_negative_zero)) + self.passing
        return blake3(text.encode()).digest()
