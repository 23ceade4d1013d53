"""How an attestation calls an operator: by its native executor, or by its Triton executor on a device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import prod
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from isobit.order.samples import Samples

Call = Callable[..., Any]
T = TypeVar("T")


def call_native(name: str, *given: Any) -> Any:
    """Call the native executor of an operator."""
    return getattr(torch.ops.isobit, name)(*given)


def calls_on(device: torch.device) -> Call:
    """Return a function that calls the Triton executor of an operator on a device, with tensors of the CPU."""

    def call(name: str, *given: Any) -> Any:
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), given)
        found = getattr(torch.ops.isobit, f"triton_{name}")(*moved)
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), found)

    return call


# Inputs on which a wrong kernel is likely to differ: full mantissas, wide exponents, empty and padded samples.

# A vector tail only; two segments; one long segment, whose tail is a single element; tails in both segments.
ROW_LENGTHS = (7, 512, 1025, 1050)
# A GPU compiles a kernel for each: a tail only; eight segments, as of a model's rows, with a tail in each.
GPU_ROW_LENGTHS = (7, 2056)


def cases_for(call: Call, native: tuple[T, ...], gpu: tuple[T, ...]) -> tuple[T, ...]:
    """Return the cases of a comparison: fewer on a GPU, where each size is a kernel to compile."""
    return native if call is call_native else gpu


def wide_values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random values with full mantissas and exponents from 2^-6 to 2^6."""
    exponent = torch.randint(-6, 7, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator, dtype=torch.float32), exponent).to(
        dtype
    )


def special_values(
    shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return wide values for functions of one element.

    Row 0 covers the range in which no result is a constant; row 1 contains NaN, infinities, zeros and large values.
    """
    x = wide_values(shape, dtype, generator)
    x[0] = torch.linspace(-100, 100, shape[1], dtype=torch.float32)
    special = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e4, -1e4, 15.9, -13.1)
    x[1, ::9] = torch.tensor(special, dtype=torch.float32)
    return x


def spans_and_samples(tokens: int) -> tuple[Tensor, Samples]:
    """Return six samples in two segments, two of them empty, with padding before and after them."""
    few, last = tokens // 9, min(tokens - 2, 2)
    lengths = (few, 0, tokens - 2 - few - last, 0, last // 2, last - last // 2)
    starts = accumulate(lengths[:-1], initial=1)
    spans = tuple((start, length) for start, length in zip(starts, lengths, strict=True))
    samples = Samples(spans, tokens, 0, len(spans))
    return torch.tensor(samples.spans), samples


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return normal values on the CPU that do not depend on torch's defaults, generators or function transforms."""
    normal = Random(seed).gauss
    values = [normal(0.0, 1.0) for _ in range(prod(shape))]
    made = torch.tensor(values, dtype=torch.float32, device=torch.device("cpu"))
    return made.reshape(shape).to(dtype)
