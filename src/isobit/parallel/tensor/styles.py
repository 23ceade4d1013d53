"""Parallel styles for `parallelize_module`: they split a layer in place and keep its bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from isobit.errors import UnsupportedError
from isobit.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.parallel.tensor.vocab import VocabParallelEmbedding


class ColwiseParallel(ParallelStyle):
    """Split a linear layer by its outputs: the input is on every rank, the output is a rank's part.

    Example::

        from torch.distributed.tensor.parallel import parallelize_module
        from isobit.parallel import ColwiseParallel, RowwiseParallel

        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return split_in_place(
            module, nn.Linear, ColumnParallelLinear, device_mesh, self.src_data_rank
        )


class RowwiseParallel(ParallelStyle):
    """Split a linear layer by its inputs: the input is a rank's part, the output is on every rank.

    See `ColwiseParallel` for an example.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return split_in_place(module, nn.Linear, RowParallelLinear, device_mesh, self.src_data_rank)


class VocabParallel(ParallelStyle):
    """Split an embedding by its rows: ids and output are on every rank.

    Example::

        parallelize_module(model, mesh["tp"], {"embed_tokens": VocabParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return split_in_place(
            module, nn.Embedding, VocabParallelEmbedding, device_mesh, self.src_data_rank
        )


@torch.no_grad()
def split_in_place(
    module: nn.Module, stock: type[nn.Module], parallel: Any, mesh: DeviceMesh, source: int | None
) -> nn.Module:
    """Change a module into its parallel form, since `parallelize_module` keeps no other module.

    Args:
        module: A whole layer.
        stock: The class that the layer must have.
        parallel: The class that it gets.
        mesh: A mesh of one axis.
        source: The rank whose data all ranks take, as torch's own styles do; None if they have the
            same already.

    Raises:
        UnsupportedError: The module is of another class, or split already.
    """
    if not isinstance(module, stock) or (
        type(module) is not stock and not type(module).__module__.startswith("isobit.nn.")
    ):
        raise UnsupportedError(
            expected=f"a plain {stock.__name__}",
            received=type(module).__name__,
            remedy=f"name the {stock.__name__} itself in the plan, and split it once",
        )
    tp_group = TensorParallelGroup.of(mesh)
    if source is not None and tp_group.size > 1:
        for parameter in module.parameters():
            if not parameter.is_meta:
                dist.broadcast(parameter.data, group=tp_group.group, group_src=source)
    before, module.__class__ = module.__class__, parallel
    try:
        module.split(tp_group)  # type: ignore[operator]
    except BaseException:
        module.__class__ = before
        raise
    return module
