"""One rank's training run by isobit: the same program under torchrun, simulated, and alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isobit.gates.training.workload import (
    RankLayout,
    Rows,
    Workload,
    active_tokens,
    draw_samples,
    lay_out,
    make_model,
)
from isobit.integrations.transformers import tensor_parallel
from isobit.integrations.transformers.enabling import enable
from isobit.integrations.transformers.scoring import logprobs
from isobit.ops.exact_sum.op import exact_sum
from isobit.optim import AdamW
from isobit.parallel import checkpoint
from isobit.parallel.collectives.levels import Group, Levels
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.grad_norm import clip_grad_norm_
from isobit.parallel.data.gradients import Gradients
from isobit.parallel.data.loss_meter import LossMeter


class Scorer(nn.Module):
    """The log-probabilities of a model as a module, which DDP and fully_shard wrap."""

    def __init__(self, model: Any) -> None:
        """Wrap a model of transformers on which isobit is enabled."""
        super().__init__()
        self.model = model

    def forward(self, rows: Rows) -> Tensor:
        """Return log-probabilities [B, T] in fp32; +0 where there is no target."""
        # Not a view: fully_shard puts its hooks on the output, and a view may lose them.
        return logprobs(self.model, rows.ids, rows.mask, targets=rows.targets).clone()


@dataclass
class Run:
    """One rank's part of a run."""

    workload: Workload
    layout: RankLayout
    mesh: DeviceMesh | None
    scorer: nn.Module
    gradients: Gradients
    optimizer: AdamW
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @property
    def data_group(self) -> Group:
        """The data-parallel ranks, or None on one rank."""
        return None if self.mesh is None else data_ranks(self.mesh, self.layout)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same parameters, or None on one rank."""
        return None if self.mesh is None else self.mesh["data"].get_group()

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks, or None on one rank."""
        return None if self.mesh is None else self.mesh["tensor"].get_group()

    @property
    def model(self) -> Any:
        """The model of transformers, without its wrappers."""
        wrapped = (
            self.scorer.module if isinstance(self.scorer, DistributedDataParallel) else self.scorer
        )
        return wrapped.model


def data_ranks(mesh: DeviceMesh, layout: RankLayout) -> Group:
    """Return the data-parallel ranks; those that exchange rows of experts are the inner level."""
    if layout.experts == 1:
        return mesh["data"].get_group()
    return Levels(mesh["data", "experts"], check_hosts=False)


def make_run(workload: Workload, layout: RankLayout, dtype: torch.dtype) -> Run:
    """Build the model, split it over tensor-parallel ranks and wrap it for the layout."""
    mesh = None
    if layout.ranks > 1:
        shape, names = layout.mesh
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make_model(workload, dtype)
    enable(model, strict=False)
    if layout.tensor > 1:
        assert mesh is not None
        tensor_parallel.shard(model, mesh["tensor"])
    if layout.experts > 1:
        assert mesh is not None
        tensor_parallel.shard_experts(model, mesh["experts"])
    if layout.context > 1:
        assert mesh is not None
        tensor_parallel.split_context(model, mesh["context"])
    scorer: nn.Module = Scorer(model)
    group = None if mesh is None else data_ranks(mesh, layout)
    if layout.engine == "ddp":
        assert isinstance(group, dist.ProcessGroup)
        scorer = DistributedDataParallel(scorer, process_group=group)
    elif layout.engine == "fsdp2":
        assert mesh is not None
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(scorer, mesh=mesh["data"])
    order = "micro" if layout.engine == "fsdp2" or layout.experts > 1 else "rank"
    batch = GlobalBatch(workload.samples, layout.data, layout.micro, order)
    gradients = Gradients(scorer, batch, group=group)
    optimizer = AdamW(scorer.parameters(), lr=workload.rate, weight_decay=0.1)
    return Run(workload, layout, mesh, scorer, gradients, optimizer)


def take_step(run: Run, step: int) -> None:
    """Run one optimizer step over the global batch of this step."""
    samples = draw_samples(run.workload, step)
    active, meter, batch = active_tokens(samples), LossMeter(), run.gradients.batch
    for micro in range(run.layout.micro):
        held = batch.samples(run.gradients.rank, micro)
        rows = lay_out(samples[held.start : held.stop])
        with run.gradients.micro_batch(micro):
            found = run.scorer(rows)
            share_loss(found, rows, active, batch.shares).backward()  # type: ignore[no-untyped-call]
        meter.add(-found.detach(), rows.active)
    run.losses.append(float(meter.value(run.data_group, dtype=torch.float32)))
    run.norms.append(float(clip_grad_norm_(run.model, run.workload.clip, group=shard_group(run))))
    run.optimizer.step()


def share_loss(found: Tensor, rows: Rows, active: int, shares: int) -> Tensor:
    """Return a micro-batch's part of the mean over the active tokens of the global batch."""
    return exact_sum(found) / -active


def shard_group(run: Run) -> Group:
    """Return the ranks over which the gradients of one replica are sharded."""
    if run.layout.experts > 1:
        assert run.mesh is not None
        return run.mesh["experts"].get_group()
    return run.data_group if run.layout.engine == "fsdp2" else run.tensor_group


def train(
    workload: Workload,
    layout: RankLayout,
    dtype: torch.dtype,
    *,
    stop: int | None = None,
    load: str | None = None,
    save: str | None = None,
) -> Run:
    """Train all steps, or those before `stop`.

    Args:
        workload: The model and the data.
        layout: The ranks and micro-batches.
        dtype: Of the parameters.
        stop: The step before which to stop.
        load: A checkpoint to resume from, saved at any layout.
        save: Where to write a checkpoint at the end.
    """
    run = make_run(workload, layout, dtype)
    first = 0 if load is None else checkpoint.load(load, run.model, run.optimizer).step
    last = workload.steps if stop is None else stop
    for step in range(first, last):
        run.optimizer.zero_grad()
        take_step(run, step)
    if save is not None:
        checkpoint.save(save, run.model, run.optimizer, step=last)
    return run
