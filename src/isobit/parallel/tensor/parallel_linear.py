"""The base class of column-parallel and row-parallel linear layers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isobit.parallel.tensor.shard import tp_group_of
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup

Layer = TypeVar("Layer", bound="ParallelLinear")


class ParallelLinear(nn.Linear):
    """A linear layer that is split over ranks. Subclasses say along which axis.

    Args:
        in_features: Of the unsplit layer.
        out_features: Of the unsplit layer.
        bias: Whether the layer has a bias.
        mesh: A mesh of one axis, a process group, or None for one rank alone.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        CutError: The layer cannot be split over so many ranks on segment edges.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh | TensorParallelGroup | None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialize the whole layer and keep this rank's part."""
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.split(TensorParallelGroup.of(mesh))

    @classmethod
    def from_linear(
        cls: type[Layer], module: nn.Linear, mesh: DeviceMesh | TensorParallelGroup | None
    ) -> Layer:
        """Return this rank's part of a whole layer, which is not changed."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = module.in_features, module.out_features
        made.weight, made.bias = module.weight, module.bias
        made.split(TensorParallelGroup.of(mesh))
        if made.bias is module.bias and made.bias is not None:  # not split: a copy of its own
            made.bias = nn.Parameter(
                module.bias.detach().clone(), requires_grad=module.bias.requires_grad
            )
        return made.train(module.training)

    def split(self, tp_group: TensorParallelGroup) -> None:
        """Keep this rank's part of the parameters; `in_features` and `out_features` stay."""
        raise NotImplementedError

    @property
    def tp_group(self) -> TensorParallelGroup:
        """The ranks over which this layer is split."""
        tp_group = tp_group_of(self)
        assert tp_group is not None
        return tp_group
