"""How an attestation calls an operator: by its native executor, or by its Triton executor on a device."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from isobit.order.samples import Samples

Call = Callable[..., Any]


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
    """Return three samples in one segment, one of them empty, with padding before and after them."""
    samples = Samples(
        ((1, tokens // 9), (tokens, 0), (1 + tokens // 9, tokens - tokens // 9 - 2)), tokens, 0, 3
    )
    return torch.tensor(samples.spans), samples


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return normal values on the CPU that do not depend on torch's defaults, generators or function transforms."""
    normal = Random(seed).gauss
    values = [normal(0.0, 1.0) for _ in range(prod(shape))]
    made = torch.tensor(values, dtype=torch.float32, device=torch.device("cpu"))
    return made.reshape(shape).to(dtype)
