"""Run a whole model under tensor parallelism on simulated ranks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from isobit.auditing.axes.collectives import PATIENCE
from isobit.auditing.axes.sharded_products import shard
from isobit.auditing.axes.tensor_plan import COLUMN, Plan, Split
from isobit.auditing.axes.variation import same_start
from isobit.auditing.inputs import Inputs
from isobit.auditing.judging.effects import outputs_of
from isobit.foundation.machine import thread_count
from isobit.integrations.transformers.tensor_parallel import shard as shard_model
from isobit.integrations.transformers.state import find_state
from isobit.parallel.tensor.column_linear import column_linear
from isobit.parallel.tensor.row_linear import row_linear
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.simulator import World


def run_on_ranks(inputs: Inputs, plan: Plan, ranks: int) -> dict[str, Tensor]:
    """Return the outputs of rank 0 of a model that is split over simulated ranks."""
    threads = torch.get_num_threads()

    def program(rank: int) -> dict[str, Tensor]:
        with thread_count(threads), torch.no_grad(), same_start():
            model = split_copy(inputs.model, plan, ranks)
            out = outputs_of(model(*inputs.args, **inputs.named))
        return {name: tensor.clone() for name, tensor in out.items()}

    found: dict[str, Tensor] = World(ranks, patience=PATIENCE).run(program).values[0]
    return found


def split_copy(model: nn.Module, plan: Plan, ranks: int) -> nn.Module:
    """Return this rank's part of a model; what is not split is shared with the model itself."""
    if find_state(model) is not None:
        mine = copy.deepcopy(model)
        shard_model(mine, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
        return mine
    tensors = itertools.chain(model.parameters(), model.buffers())
    mine = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    group = TensorParallelGroup.of(dist.group.WORLD)
    for path, split in plan.splits.items():
        parent, _, name = path.rpartition(".")
        layer: Any = SplitLayer(mine.get_submodule(path), split, group)
        setattr(mine.get_submodule(parent), name, layer)
    return mine


class SplitLayer(nn.Module):
    """A rank's part of a linear layer, of torch's products or of isobit's."""

    def __init__(self, whole: Any, split: Split, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the weight."""
        super().__init__()
        column = split.by == COLUMN
        extent = whole.weight.shape[0 if column else 1]
        if extent % group.size:
            raise ValueError(f"{split.path}: {extent} cannot be divided over {group.size} ranks")
        self.split, self.group, self.extent = split, group, extent
        self.ours = type(whole).__module__.startswith("isobit.")
        self.weight = shard(whole.weight.detach(), 0 if column else 1, group.rank, group.size)
        bias = None if whole.bias is None else whole.bias.detach()
        self.bias = shard(bias, 0, group.rank, group.size) if column and bias is not None else bias

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's outputs, or the sum over all ranks' inputs."""
        if self.split.by == COLUMN:
            if self.ours:
                out = column_linear(input, self.weight, self.bias, tp_group=self.group)
            else:
                out = F.linear(input, self.weight, self.bias)
            return self.gather(out) if self.split.gathers else out
        if input.shape[-1] == self.extent:
            input = shard(input, -1, self.group.rank, self.group.size)
        if self.ours:
            return row_linear(input, self.weight, self.bias, tp_group=self.group)
        total = F.linear(input, self.weight)
        dist.all_reduce(total)
        return total if self.bias is None else total + self.bias

    def gather(self, part: Tensor) -> Tensor:
        """Return the outputs of all ranks."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.group.size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, -1)
