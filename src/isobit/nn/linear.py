"""isobit.nn.Linear."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isobit.ops.linear.op import linear_with_packed
from isobit.ops.linear.packed import Snapshot, WatchedWeight
from isobit.order.samples import Samples

PACKED = "_isobit_packed"  # on a frozen layer: its PackedWeight; None on a copy of one


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
        read = read_weight(self)
        return linear_with_packed(input, read.weight, self.bias, samples, read.packed)


class WeightRead(NamedTuple):
    """What one call reads of a layer. The caller holds it until the call has ended.

    Attributes:
        weight: The layer's weight, or a frozen layer's snapshot of it.
        packed: Its packed form, or None.
        snapshot: Keeps the memory that the weight had, should another thread write it meanwhile.
    """

    weight: Tensor
    packed: Tensor | None = None
    snapshot: Snapshot | None = None


def read_weight(layer: torch.nn.Linear | torch.nn.Embedding) -> WeightRead:
    """Return what a call reads: the present snapshot of a frozen layer where no gradient is taken, else the weight."""
    weight = layer.weight
    watched: WatchedWeight | None = layer.__dict__.get(PACKED)
    # A compiled graph packs on the fly: it cannot check whether the weight was written. In training a form would be
    # packed at every step.
    if (
        watched is None
        or torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and weight.requires_grad)
    ):
        return WeightRead(weight)
    snapshot = watched.current(weight)
    if snapshot is None:
        return WeightRead(watched.hold(weight))
    return WeightRead(snapshot.weight, snapshot.packed, snapshot)
