"""Checks that gradient reducers share: of the batch, the parameters and the gradients present."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.arguments import refuse_distributed
from isobit.ops.share import accumulation_dtype
from isobit.parallel.data.global_batch import GlobalBatch


def check_one_dtype(parameters: list[nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of all partial gradients, which share buckets.

    Raises:
        UnsupportedError: The parameters need more than one dtype or device.
    """
    kinds = {(accumulation_dtype(p.dtype), p.device) for p in parameters}
    if len(kinds) > 1:
        found = sorted(f"partial gradients of {dtype} on {device}" for dtype, device in kinds)
        raise UnsupportedError(
            expected="parameters on one device, either all or none of them fp64",
            received=", ".join(found),
            remedy="convert the model to one dtype and device",
        )
    return kinds.pop() if kinds else (torch.float32, torch.device("cpu"))


def check_not_distributed(model: nn.Module) -> None:
    """Require plain parameters: only `fully_shard` (FSDP2) has a reducer that knows shards.

    Raises:
        UnsupportedError: A trained parameter is a DTensor.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            refuse_distributed(name, parameter)


def check_rank_order(batch: GlobalBatch) -> None:
    """Require that each rank's micro-batches are consecutive: they are merged before the ranks are.

    Raises:
        UnsupportedError: The batch has `order="micro"`.
    """
    if batch.order != "rank" and batch.ranks > 1 and batch.micro_batches > 1:
        raise UnsupportedError(
            expected="consecutive samples on each rank: GlobalBatch(..., order='rank')",
            received=f"order={batch.order!r}",
            remedy="use order='micro' only with fully_shard, which adds the ranks at every "
            "micro-batch",
        )


def check_same_parameters(model: nn.Module, known: list[nn.Parameter]) -> None:
    """Require the parameters that have hooks: another would keep an unreduced gradient.

    Raises:
        ArgumentError: Parameters were replaced, frozen or unfrozen.
    """
    trained = {p for p in model.parameters() if p.requires_grad}
    if trained != set(known):
        added, gone = len(trained - set(known)), len(set(known) - trained)
        raise ArgumentError(
            expected=f"the {len(known)} trained parameters that Gradients was made with",
            received=f"{added} others, and {gone} of them gone or frozen",
            remedy="call close() and make a new Gradients after parameters are replaced, frozen or "
            "unfrozen",
        )


def check_no_leftover_gradients(parameters: list[nn.Parameter]) -> None:
    """Require that every `p.grad` is None at the start of a micro-batch.

    Raises:
        ArgumentError: A parameter has a gradient.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            raise ArgumentError(
                expected="no gradient from before",
                received=f"a gradient of a parameter {list(parameter.shape)}",
                remedy="call optimizer.zero_grad(), which sets gradients to None, after each step",
            )


def check_any_gradient(absent: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """Require a backward: one after the block would leave this rank's own gradient in `p.grad`.

    Raises:
        UnsupportedError: No parameter has a gradient of this micro-batch.
    """
    if parameters and len(absent) == len(parameters):
        raise UnsupportedError(
            expected="a backward inside Gradients.micro_batch",
            received=f"a gradient of none of {len(parameters)} parameters",
            remedy="call backward before the block ends, also if the loss of the share is zero",
        )
