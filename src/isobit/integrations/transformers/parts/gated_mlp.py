"""The gated MLP with silu: gate and up are siblings, and their product is one operator with one rounding.

Gated MLPs with other activations run as composites: the activation is a part, and the product is elementwise.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.ops.swiglu.op import swiglu


def forward_swiglu(module: Any, x: Tensor) -> Tensor:
    """Compute down(silu(gate(x)) · up(x))."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(swiglu(gate, up))  # type: ignore[no-any-return]


def forward_packed_swiglu(module: Any, x: Tensor) -> Tensor:
    """Compute down(silu(gate) · up), where one layer computes gate and up."""
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    return module.down_proj(swiglu(gate, up))  # type: ignore[no-any-return]


def forward_named_swiglu(gate: str, up: str, down: str, module: Any, x: Tensor) -> Tensor:
    """Compute the gated MLP of a registered class, whose layers have other names."""
    left, right = getattr(module, gate)(x), getattr(module, up)(x)
    return getattr(module, down)(swiglu(left, right))  # type: ignore[no-any-return]
