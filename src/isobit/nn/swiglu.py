"""isobit.nn.SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.nn.linear import Linear
from isobit.ops.linear.group import linear_group
from isobit.ops.swiglu.op import swiglu
from isobit.order.samples import Samples


class SwiGLU(torch.nn.Module):
    """The gated feed-forward block of Llama: down_proj(silu(gate_proj(x)) * up_proj(x)).

    The gradient of x through gate_proj and up_proj is one sum: isobit.linear_group. Their forward hooks are not called
    while gradients are enabled.

    Args:
        in_features: The size of the input.
        hidden_features: The number of outputs of gate_proj and up_proj.
        out_features: The size of the output; by default in_features.
        bias: Whether the three layers have biases.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        >>> block = isobit.nn.SwiGLU(16, 48)
        >>> sorted(block.state_dict())
        ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight']
        >>> x = torch.randn(8, 16)
        >>> torch.equal(block(x)[:1], block(x[:1]))
        True
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = Linear(in_features, hidden_features, **made)
        self.up_proj = Linear(in_features, hidden_features, **made)
        self.down_proj = Linear(hidden_features, out_features or in_features, **made)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute down_proj(silu(gate_proj(input)) * up_proj(input))."""
        layers = (self.gate_proj, self.up_proj)
        if torch.is_grad_enabled():
            weights, biases = [m.weight for m in layers], [m.bias for m in layers]
            gate, up = linear_group(input, weights, biases, samples=samples)
        else:  # the same bits, from packed weights if the layers are frozen
            gate, up = (layer(input, samples) for layer in layers)
        return self.down_proj(swiglu(gate, up), samples)  # type: ignore[no-any-return]
