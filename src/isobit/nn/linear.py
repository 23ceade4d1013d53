"""isobit.nn.Linear."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear.op import linear_with_packed
from isobit.ops.linear.packed import PackedWeight
from isobit.order.samples import Samples

PACKED = "_isobit_packed"  # on a frozen layer: its PackedWeight


class Linear(torch.nn.Linear):
    """torch.nn.Linear that computes isobit.linear.

    Example:
        >>> layer = isobit.nn.Linear(64, 32)
        >>> x = torch.randn(8, 64)
        >>> torch.equal(layer(x)[:1], layer(x[:1]))
        True
    """

    @classmethod
    def sharing(cls, module: torch.nn.Linear) -> Linear:
        """Return a layer that shares the parameters of a torch.nn.Linear."""
        made = cls(module.in_features, module.out_features, bias=False, device="meta")
        made.weight = module.weight
        made.bias = module.bias
        return made.train(module.training)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute isobit.linear(input, weight, bias)."""
        return linear_with_packed(input, self.weight, self.bias, samples, packed_form(self))


def packed_form(layer: torch.nn.Linear) -> Tensor | None:
    """Return the packed form of a frozen layer's present weight; None where there is none that may be read."""
    packed: PackedWeight | None = layer.__dict__.get(PACKED)
    # A compiled graph packs on the fly: it cannot check whether the weight was written.
    if packed is None or torch.compiler.is_compiling():
        return None
    return packed.current(layer.weight)
