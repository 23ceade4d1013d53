"""Styles for torch's own parallelize_module: Column, Row and Vocabulary split a layer in place, with unsplit bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from isobit.errors import UnsupportedError
from isobit.parallel.tensor.column_linear import ColumnParallelLinear
from isobit.parallel.tensor.row_linear import RowParallelLinear
from isobit.parallel.tensor.shard import Ranks
from isobit.parallel.tensor.vocab_embedding import VocabParallelEmbedding

Split = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding


class Column(ParallelStyle):
    """A linear layer by its outputs: the input is on every rank, the output is a rank's part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return split_in_place(
            module, nn.Linear, ColumnParallelLinear, device_mesh, self.src_data_rank
        )


class Row(ParallelStyle):
    """A linear layer by its inputs: the input is a rank's part, the output is on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return split_in_place(module, nn.Linear, RowParallelLinear, device_mesh, self.src_data_rank)


class Vocabulary(ParallelStyle):
    """An embedding by its rows: ids and the output are on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return split_in_place(
            module, nn.Embedding, VocabParallelEmbedding, device_mesh, self.src_data_rank
        )


@torch.no_grad()
def split_in_place(
    module: nn.Module, stock: type[nn.Module], made: Any, mesh: DeviceMesh, source: int | None
) -> nn.Module:
    """The module itself becomes its split form, since parallelize_module keeps no other.

    As with torch's own, all ranks take the source's data; a source of None means that they have the same already.
    """
    if not isinstance(module, stock) or (
        type(module) is not stock and type(module).__module__ != "isobit.nn"
    ):
        raise UnsupportedError(
            expected=f"a plain {stock.__name__}",
            received=type(module).__name__,
            remedy=f"name the {stock.__name__} itself in the plan, and split it once",
        )
    ranks = Ranks.of(mesh)
    if source is not None and ranks.parts > 1:
        for parameter in module.parameters():
            if not parameter.is_meta:
                dist.broadcast(parameter.data, group=ranks.group, group_src=source)
    before, module.__class__ = module.__class__, made
    try:
        module.split(ranks)  # type: ignore[operator]
    except BaseException:
        module.__class__ = before
        raise
    return module
