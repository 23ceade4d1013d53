"""Gradients of a model that fully_shard split: its own reduce-scatter, in our order, with a counter of shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from isobit.errors import UnsupportedError
from isobit.ops.portable.rounding import settle_nans
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Counter, Node
from isobit.parallel.collectives import all_reduce
from isobit.parallel.collectives.additions import add_into
from isobit.parallel.data.batch import GlobalBatch
from isobit.parallel.data.ddp import refuse_tied
from isobit.parallel.data.reducer import refuse_changed, refuse_leftovers


class TreeReduceScatter(ReduceScatter):
    """Of one fully_shard group: every micro-batch is a subtree over all ranks; their shards are merged by a counter."""

    def __init__(self) -> None:
        self.under_way: tuple[Node, bool] | None = None
        self.pushed: Node | None = None  # the micro-batch that was last taken in
        self.counter: Counter[Tensor] = Counter(add_into)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        # Its average is taken as the sum. Any other operation goes with a division before or after this call.
        if self.under_way is None or op != dist.ReduceOp.AVG:
            raise UnsupportedError(
                expected="a backward inside Gradients.micro_batch, of fp32 partials, without a gradient divide factor",
                received="a backward of its own"
                if self.under_way is None
                else f"{op} of {input_tensor.dtype}",
                remedy="divide the loss by the global count of active tokens: gradients are summed; "
                "for fp64, or a forced sum, pass the model to Gradients without fully_shard",
            )
        if self.pushed is not None:
            raise UnsupportedError(
                expected="one backward in each micro-batch, through every fully_shard group",
                received="a second one",
                remedy="add the losses of a micro-batch, and call backward once",
            )
        all_reduce.reduce_scatter(output_tensor, input_tensor, group)
        self.pushed, last = self.under_way
        node = self.pushed
        self.counter.push(
            node, output_tensor.clone() if not last or self.counter else output_tensor
        )
        if last:
            ((_, total),) = self.counter
            if total is not output_tensor:
                output_tensor.copy_(settle_nans(total))
            self.counter.clear()


class FsdpCarrier:
    """Each micro-batch is cut over the ranks and reduce-scattered; the shards of the last one are the whole's."""

    def __init__(
        self, model: nn.Module, batch: GlobalBatch, group: dist.ProcessGroup | None
    ) -> None:
        refuse_tied(model)
        if batch.ranks > 1 and batch.micro_batches > 1 and batch.order != "micro":
            raise UnsupportedError(
                expected="a batch whose micro-batches are runs of all samples: GlobalBatch(..., order='micro')",
                received=f"order={batch.order!r}",
                remedy="fully_shard adds the ranks at every micro-batch, so a micro-batch must be one subtree",
            )
        if batch.ranks == 1:
            raise UnsupportedError(
                expected="two ranks or more under fully_shard",
                received="one rank",
                remedy="pass the model to Gradients without fully_shard",
            )
        refuse_other_ranks(model, group)
        self._batch, self._model = batch, model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._scatters: list[TreeReduceScatter] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                scatter = TreeReduceScatter()
                module.set_custom_reduce_scatter(scatter)
                # An absent gradient is zeros, or ranks and micro-batches would bring different parameters together.
                module.set_reduce_scatter_unused_params(True, recurse=False)
                set_grad_dtype(module, accumulation_dtype)
                self._scatters.append(scatter)
        self.peak_bytes = 0

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """The gathered parameters, of which autograd delivers the gradients."""
        groups = [
            g
            for m in self._model.modules()
            if isinstance(m, FSDPModule)
            for g in state_of(m)._fsdp_param_groups
        ]
        names = {p: name for name, p in self._model.named_parameters()}
        return [
            (names[held.sharded_param], held._unsharded_param)
            for group in groups
            for held in group.fsdp_params
            if held._unsharded_param.requires_grad
        ]

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        refuse_changed(self._model, self._parameters)
        refuse_leftovers(self._parameters)
        for scatter in self._scatters:
            scatter.under_way = node.ancestor(self._batch.ranks), last
        return nullcontext()

    def end(self, node: Node, last: bool) -> None:
        held = sum(value.nbytes for scatter in self._scatters for _, value in scatter.counter)
        self.peak_bytes = max(self.peak_bytes, held)
        whole = node.ancestor(self._batch.ranks)
        missing = sum(scatter.pushed != whole for scatter in self._scatters)
        if missing:
            raise UnsupportedError(
                expected="one backward in each micro-batch, through every fully_shard group",
                received=f"none through {missing} of {len(self._scatters)}",
                remedy="call fully_shard on what every micro-batch uses, or pass the plain model to Gradients",
            )
        for scatter in self._scatters:
            scatter.under_way = scatter.pushed = None
        if not last:
            self._drop()
            return
        for (
            parameter
        ) in self._parameters:  # the engine's own rounding to 16 bits has NaNs of its own
            if parameter.grad is not None and parameter.dtype.itemsize < 4:
                settle_nans(parameter.grad.to_local())  # type: ignore[attr-defined]

    def clear(self) -> None:
        for scatter in self._scatters:
            scatter.under_way = scatter.pushed = None
            scatter.counter.clear()
        give_up(self._model)
        self._drop()

    def _drop(self) -> None:
        """The engine leaves a micro-batch's shards in p.grad, rounded; the counter has them unrounded."""
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(DefaultReduceScatter())
                module.set_reduce_scatter_unused_params(False, recurse=False)
                set_grad_dtype(module, lambda dtype: dtype)
        self._scatters.clear()


def refuse_other_ranks(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Shards are summed by fully_shard's own group; replicas of shards would be averaged by stock."""
    wanted = dist.get_process_group_ranks(group)
    for module in model.modules():
        for held in state_of(module)._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            found = held.mesh_info
            replicated = isinstance(found, DDPMeshInfo)
            if replicated or dist.get_process_group_ranks(found.shard_process_group) != wanted:
                raise UnsupportedError(
                    expected=f"shards over the batch's ranks {wanted}, and no replicas of them",
                    received=f"fully_shard over {found.mesh}",
                    remedy="call fully_shard with a mesh of one axis, whose group Gradients is given",
                )


def set_grad_dtype(module: FSDPModule, chosen: Callable[[torch.dtype], torch.dtype]) -> None:
    """Of the gathered parameters, which exist from the first unshard on; gradients that are partials are fp32."""
    handle = module.unshard()
    if handle is not None:
        handle.wait()
    for group in state_of(module)._fsdp_param_groups:
        for parameter in group.fsdp_params:
            unsharded = parameter._unsharded_param
            unsharded.grad_dtype = chosen(unsharded.dtype)
    module.reshard()


def give_up(model: nn.Module) -> None:
    """Ends a backward that failed as the engine would, but with nothing to reduce, so that no other rank is waited for.

    Else the gathered parameters keep a gradient of the failed step, and the next backward is never ended.
    """
    if state_of(model)._is_root is None:
        return  # no forward was ever run
    groups = [
        group
        for m in model.modules()
        if isinstance(m, FSDPModule)
        for group in state_of(m)._fsdp_param_groups
    ]
    for group in groups:
        group.reduce_scatter_unused_params = False
        for parameter in group.fsdp_params:
            parameter._unsharded_param.grad = parameter.unsharded_accumulated_grad = None
    state_of(model)._root_post_backward_final_callback()
    for group in groups:
        group.reduce_scatter_unused_params = True


def state_of(module: Any) -> Any:
    """What fully_shard keeps of a module."""
    return module._get_fsdp_state()
