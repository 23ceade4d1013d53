"""The gradient reducer of a model to which `fully_shard` (FSDP2) was applied.

FSDP2 reduce-scatters after every micro-batch. We replace its reduce-scatter by ours and merge the
resulting shards of the micro-batches with one binary counter per `fully_shard` group.
"""

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
from isobit.ops.portable.sums import settle_nans
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Counter, Node
from isobit.parallel.collectives.elementwise_add import add_into
from isobit.parallel.collectives.levels import Group, Levels, ranks_of
from isobit.parallel.collectives.tree_collectives import reduce_scatter
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.reducer_checks import check_no_leftover_gradients, check_same_parameters
from isobit.parallel.data.tied_weights import check_not_tied


class TreeReduceScatter(ReduceScatter):
    """The reduce-scatter of one `fully_shard` group: a micro-batch is a subtree over all ranks."""

    def __init__(self, levels: Levels | None) -> None:
        """Start with an empty counter; `levels` are used instead of FSDP2's group if given."""
        self.levels = levels
        self.current: tuple[Node, bool] | None = None  # (node, last) of the open micro-batch
        self.pushed: Node | None = None  # the node whose gradient arrived in this micro-batch
        self.counter: Counter[Tensor] = Counter(add_into)  # of shards # [numel/ranks]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter a micro-batch's gradients; in the last one, output the sum of all."""
        # AVG is treated as a sum. For any other operation FSDP2 divides before or after this call.
        if self.current is None or op != dist.ReduceOp.AVG:
            raise UnsupportedError(
                expected="a backward inside Gradients.micro_batch, of fp32 partial gradients, "
                "without a gradient divide factor",
                received="a backward of its own"
                if self.current is None
                else f"{op} of {input_tensor.dtype}",
                remedy="divide the loss by the global count of active tokens, since gradients are "
                "summed; for fp64, or a forced sum, pass the model without fully_shard",
            )
        if self.pushed is not None:
            raise UnsupportedError(
                expected="one backward in each micro-batch, through every fully_shard group",
                received="a second one",
                remedy="add the losses of a micro-batch, and call backward once",
            )
        reduce_scatter(output_tensor, input_tensor, self.levels or group)
        self.pushed, last = self.current
        only = last and not self.counter  # one micro-batch per step: no copy is needed
        self.counter.push(self.pushed, output_tensor if only else output_tensor.clone())
        if last:
            ((_, total),) = self.counter
            if total is not output_tensor:
                output_tensor.copy_(settle_nans(total))
            self.counter.clear()


class FsdpReducer:
    """Reduces every micro-batch over the ranks, and merges the micro-batches."""

    def __init__(self, model: nn.Module, batch: GlobalBatch, group: Group) -> None:
        """Check the sharding and replace the reduce-scatter of every `fully_shard` group."""
        check_not_tied(model)
        check_micro_order(batch)
        check_shard_ranks(model, group)
        self._batch, self._model = batch, model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._scatters: list[TreeReduceScatter] = []
        for module in fsdp_modules(model):
            scatter = TreeReduceScatter(group if isinstance(group, Levels) else None)
            module.set_custom_reduce_scatter(scatter)
            # Absent gradients become zeros; otherwise ranks and micro-batches would reduce buffers
            # of different parameters.
            module.set_reduce_scatter_unused_params(True, recurse=False)
            set_grad_dtype(module, accumulation_dtype)
            self._scatters.append(scatter)
        self.peak_bytes = 0

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """The all-gathered parameters, to which autograd delivers gradients."""
        names = {p: name for name, p in self._model.named_parameters()}
        return [
            (names[held.sharded_param], held._unsharded_param)
            for module in fsdp_modules(self._model)
            for group in state_of(module)._fsdp_param_groups
            for held in group.fsdp_params
            if held._unsharded_param.requires_grad
        ]

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        """Open a micro-batch, which is a subtree over all ranks."""
        check_same_parameters(self._model, self._parameters)
        check_no_leftover_gradients(self._parameters)
        for scatter in self._scatters:
            scatter.current = node.ancestor(self._batch.ranks), last
        return nullcontext()

    def end(self, node: Node, last: bool) -> None:
        """Close a micro-batch; after the last one `p.grad` has the shards of the whole batch."""
        held = sum(value.nbytes for scatter in self._scatters for _, value in scatter.counter)
        self.peak_bytes = max(self.peak_bytes, held)
        whole = node.ancestor(self._batch.ranks)
        missing = sum(scatter.pushed != whole for scatter in self._scatters)
        if missing:
            raise UnsupportedError(
                expected="one backward in each micro-batch, through every fully_shard group",
                received=f"none through {missing} of {len(self._scatters)}",
                remedy="call fully_shard on what every micro-batch uses, or pass the plain model "
                "to Gradients",
            )
        for scatter in self._scatters:
            scatter.current = scatter.pushed = None
        if not last:
            self._drop_gradients()
            return
        for parameter in self._parameters:
            # FSDP2 itself rounds to 16 bits, which leaves several kinds of NaN.
            if parameter.grad is not None and parameter.dtype.itemsize < 4:
                settle_nans(parameter.grad.to_local())  # type: ignore[attr-defined]

    def clear(self) -> None:
        """Drop everything of this step, also in FSDP2's own state."""
        for scatter in self._scatters:
            scatter.current = scatter.pushed = None
            scatter.counter.clear()
        end_failed_backward(self._model)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Drop the rounded shards of a micro-batch; the counter has the unrounded ones."""
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """Restore the reduce-scatter and the gradient dtypes of FSDP2."""
        for module in fsdp_modules(self._model):
            module.set_custom_reduce_scatter(DefaultReduceScatter())
            module.set_reduce_scatter_unused_params(False, recurse=False)
            set_grad_dtype(module, lambda dtype: dtype)
        self._scatters.clear()


def check_micro_order(batch: GlobalBatch) -> None:
    """Require micro-batches of consecutive samples, divided over at least two ranks.

    Raises:
        UnsupportedError: The batch has another order, or one rank.
    """
    if batch.ranks > 1 and batch.micro_batches > 1 and batch.order != "micro":
        raise UnsupportedError(
            expected="micro-batches of consecutive samples: GlobalBatch(..., order='micro')",
            received=f"order={batch.order!r}",
            remedy="pass order='micro': fully_shard adds the ranks at every micro-batch, so a "
            "micro-batch must be one subtree",
        )
    if batch.ranks == 1:
        raise UnsupportedError(
            expected="two ranks or more under fully_shard",
            received="one rank",
            remedy="pass the model to Gradients without fully_shard",
        )


def check_shard_ranks(model: nn.Module, group: Group) -> None:
    """Require that `fully_shard` shards over the ranks of the batch, without replicas (HSDP).

    Raises:
        UnsupportedError: It shards over other ranks, or replicates: FSDP2 would average replicas.
    """
    wanted = ranks_of(group)
    for module in fsdp_modules(model):
        for held in state_of(module)._fsdp_param_groups:
            found = held.mesh_info
            replicated = isinstance(found, DDPMeshInfo)
            if replicated or dist.get_process_group_ranks(found.shard_process_group) != wanted:
                raise UnsupportedError(
                    expected=f"shards over the batch's ranks {wanted}, and no replicas of them",
                    received=f"fully_shard over {found.mesh}",
                    remedy="call fully_shard with a mesh of one axis, and pass its group, or "
                    "Levels of its ranks, to Gradients",
                )


def set_grad_dtype(module: FSDPModule, chosen: Callable[[torch.dtype], torch.dtype]) -> None:
    """Set the gradient dtype of the all-gathered parameters; the first unshard makes them."""
    handle = module.unshard()
    if handle is not None:
        handle.wait()
    for group in state_of(module)._fsdp_param_groups:
        for parameter in group.fsdp_params:
            unsharded = parameter._unsharded_param
            unsharded.grad_dtype = chosen(unsharded.dtype)
    module.reshard()


def end_failed_backward(model: nn.Module) -> None:
    """Run FSDP2's end of a backward with nothing to reduce, so that no other rank is waited for.

    Otherwise the all-gathered parameters keep a gradient of the failed step, and FSDP2 never ends
    the next backward.
    """
    if state_of(model)._is_root is None:
        return  # there was no forward yet
    groups = [g for module in fsdp_modules(model) for g in state_of(module)._fsdp_param_groups]
    for group in groups:
        group.reduce_scatter_unused_params = False
        for parameter in group.fsdp_params:
            parameter._unsharded_param.grad = parameter.unsharded_accumulated_grad = None
    state_of(model)._root_post_backward_final_callback()
    for group in groups:
        group.reduce_scatter_unused_params = True


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules to which `fully_shard` was applied."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def state_of(module: Any) -> Any:
    """Return FSDP2's private state of a module."""
    return module._get_fsdp_state()
