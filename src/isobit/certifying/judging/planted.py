"""A wrong version of any function that launches kernels: contracts plant it, and `certified` must catch it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Halve a tensor in place: one more product in every expression."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(out + at, mask=at < size)
    tl.store(out + at, (values * 0.5).to(out.dtype.element_ty), mask=at < size)


def one_more_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with one more product in every configuration but the first that it is called with."""
    first: dict[str, Any] = {}

    @functools.wraps(function)
    def wrong(**given: Any) -> Any:
        first.update(first or given)
        found = function(**given)
        if given != first:
            outputs = (found,) if isinstance(found, torch.Tensor) else found
            size = outputs[0].numel()
            scale_kernel[(triton.cdiv(size, 256),)](outputs[0], size, 256, num_warps=1)
        return found

    return wrong
