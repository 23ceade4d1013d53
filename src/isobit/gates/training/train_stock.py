"""The control: the same training by stock PyTorch, in the same rank layouts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from isobit.errors import UnsupportedError
from isobit.gates.training.workload import (
    RankLayout,
    Rows,
    Workload,
    active_tokens,
    draw_samples,
    lay_out,
    make_model,
)
from isobit.ops.logprob.op import IGNORED
from isobit.parallel.tensor.shard import split_module
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup

PLAN: dict[str, type[ParallelStyle]] = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


class Loss(nn.Module):
    """The summed loss of a micro-batch as a module, which DDP and fully_shard wrap."""

    def __init__(self, model: Any) -> None:
        """Wrap a model of transformers."""
        super().__init__()
        self.model = model

    def forward(self, rows: Rows) -> Tensor:
        """Return the sum of the cross-entropies of all active tokens."""
        logits = self.model(input_ids=rows.ids, attention_mask=rows.mask).logits.float()
        return cross_entropy(
            logits.flatten(0, 1), rows.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )


class StockRun:
    """One rank's part of a stock training run."""

    def __init__(self, workload: Workload, layout: RankLayout, dtype: torch.dtype) -> None:
        """Build the model, split it over tensor-parallel ranks and wrap it for the layout."""
        self.workload, self.layout = workload, layout
        if layout.context > 1:
            raise UnsupportedError(
                expected="a layout that stock is trained in",
                received=str(layout),
                remedy="leave out the ranks that share attention, or stock",
            )
        self.mesh: DeviceMesh | None = None
        self.data_group: dist.ProcessGroup | None = None
        if layout.ranks > 1:
            shape, names = layout.mesh
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            self.data_group = self.mesh["data"].get_group()
        self.model = make_model(workload, dtype)
        if layout.tensor > 1:
            self._split_tensors()
        self.experts: list[Tensor] = []  # parameters of experts that are split over ranks
        if layout.experts > 1:
            self._split_experts()
        self.loss: nn.Module = Loss(self.model)
        if layout.engine == "ddp":
            self.loss = DistributedDataParallel(self.loss, process_group=self.data_group)
        elif layout.engine == "fsdp2":
            assert self.mesh is not None
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=self.mesh["data"])
            fully_shard(self.loss, mesh=self.mesh["data"])
        self.optimizer = torch.optim.AdamW(
            self.loss.parameters(), lr=workload.rate, weight_decay=0.1
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def _split_tensors(self) -> None:
        assert self.mesh is not None
        plan = {f"model.layers.*.{name}": style() for name, style in PLAN.items()}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(self.model, self.mesh["tensor"], plan)

    def _split_experts(self) -> None:
        assert self.mesh is not None
        ranks = TensorParallelGroup.of(self.mesh["experts"])
        for layer in self.model.model.layers:
            experts = layer.mlp.experts
            split_module(experts, {"gate_up_proj": 0, "down_proj": 0}, ranks)
            experts.num_experts = len(experts.down_proj)
            experts.forward = partial(exchange_rows, experts.forward, len(experts.down_proj), ranks)
            self.experts += experts.parameters()

    def take_step(self, step: int) -> None:
        """Run one optimizer step; the loss is divided by the global count of active tokens."""
        samples = draw_samples(self.workload, step)
        active, total = active_tokens(samples), torch.zeros(())
        size = self.workload.samples // (self.layout.data * self.layout.micro)
        rank = 0
        if self.mesh is not None:
            rank = self.mesh["data"].get_local_rank() * self.layout.experts
            rank += self.mesh["experts"].get_local_rank()
        # DDP and FSDP2 average over the ranks.
        averaged = self.layout.data if self.layout.engine != "isobit" else 1
        for micro in range(self.layout.micro):
            at = (rank * self.layout.micro + micro) * size
            with self._sync(micro == self.layout.micro - 1):
                loss = self.loss(lay_out(samples[at : at + size]))
                (loss * averaged / active).backward()
            total += loss.detach()
        for group in self._data_groups():
            dist.all_reduce(total, group=group)
        self.losses.append(float(total / active))
        self._reduce()
        self.norms.append(self._clip())
        self.optimizer.step()

    def _data_groups(self) -> list[Any]:
        """Return the data-parallel ranks, along each axis of the mesh."""
        if self.mesh is None:
            return []
        return [self.mesh[axis].get_group() for axis in ("experts", "data")]

    def _sync(self, last: bool) -> Any:
        if self.layout.engine == "fsdp2":
            self.loss.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif self.layout.engine == "ddp" and not last:
            return self.loss.no_sync()  # type: ignore[operator]
        return nullcontext()

    def _reduce(self) -> None:
        """All-reduce what DDP and FSDP2 do not: plain models, and norms of tensor-parallel heads."""
        if self.mesh is None:
            return
        for name, parameter in self.model.named_parameters():
            grad = local_of(parameter.grad)
            if self.layout.tensor > 1 and name.endswith(("q_norm.weight", "k_norm.weight")):
                dist.all_reduce(grad, group=self.mesh["tensor"].get_group())
            if self.layout.engine == "isobit" and self.layout.data > 1:
                is_split = any(parameter is each for each in self.experts)
                for group in self._data_groups()[is_split:]:
                    dist.all_reduce(grad, group=group)

    def _clip(self) -> float:
        """Clip by torch's functions, which do not accept tensors and DTensors in one call."""
        kinds: list[list[Tensor]] = [[], [], self.experts]
        for parameter in self.loss.parameters():
            if not any(parameter is each for each in self.experts):
                kinds[isinstance(parameter.grad, DTensor)].append(parameter)
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
            for held in kinds
            if held
        ]
        if self.experts:
            assert self.mesh is not None
            squared = norms[-1].square()
            dist.all_reduce(squared, group=self.mesh["experts"].get_group())
            norms[-1] = squared.sqrt()
        whole = torch.linalg.vector_norm(
            torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms])
        )
        for held in kinds:
            torch.nn.utils.clip_grads_with_norm_(held, self.workload.clip, whole)
        return float(whole)


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of their experts, or back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], into: list[int], group: Any) -> Tensor:
        """Return the rows that arrive."""
        ctx.how = into, out, group
        taken = rows.new_empty(sum(into), rows.shape[1])
        dist.all_to_all_single(taken, rows.contiguous(), into, out, group=group)
        return taken

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of the rows that were sent."""
        return Exchange.forward(ctx, grad, *ctx.how), None, None, None


def exchange_rows(
    compute: Callable[..., Tensor],
    own: int,
    ranks: TensorParallelGroup,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute experts that are split over ranks, as stock code does: all-to-all of rows, and index_add of outputs."""
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    tokens, owners = order // experts.shape[1], flat[order] // own
    sent = torch.bincount(owners, minlength=ranks.size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    out, into = sent.tolist(), received.tolist()
    ids = flat.new_empty(sum(into))
    dist.all_to_all_single(ids, flat[order] % own, into, out, group=ranks.group)
    arrived: Tensor = Exchange.apply(x[tokens], out, into, ranks.group)  # type: ignore[no-untyped-call]
    made = compute(arrived, ids.unsqueeze(1), torch.ones_like(ids, dtype=x.dtype).unsqueeze(1))
    back: Tensor = Exchange.apply(made, into, out, ranks.group)  # type: ignore[no-untyped-call]
    return torch.zeros_like(x).index_add(0, tokens, back * weights.reshape(-1)[order].unsqueeze(1))


def local_of(grad: Any) -> Tensor:
    """Return this rank's own part of a gradient."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


def train_stock(
    workload: Workload, layout: RankLayout, dtype: torch.dtype, stop: int | None = None
) -> StockRun:
    """Train all steps, or those before `stop`."""
    run = StockRun(workload, layout, dtype)
    for step in range(workload.steps if stop is None else stop):
        run.optimizer.zero_grad()
        run.take_step(step)
    return run
