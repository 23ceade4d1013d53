"""How an attestation calls an operator: by its native executor, or by its Triton executor on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

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
