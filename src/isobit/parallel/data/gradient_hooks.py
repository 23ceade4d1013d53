"""Post-accumulate-grad hooks, and the dtype of `p.grad` while partial gradients are collected."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isobit.ops.share import accumulation_dtype
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.reducer_checks import check_no_leftover_gradients


def register_hooks(
    take: Callable[[Tensor], None], parameters: list[nn.Parameter]
) -> list[RemovableHandle]:
    """Call `take(parameter)` whenever autograd has written a parameter's gradient."""
    return [p.register_post_accumulate_grad_hook(take) for p in parameters]  # type: ignore[no-untyped-call]


def trained_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters that require gradients, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def expect_partial_gradients(parameters: list[nn.Parameter], batch: GlobalBatch) -> None:
    """Let autograd write unrounded gradients, before a micro-batch.

    A gradient of a share of the batch has the dtype of sums (fp32 for 16-bit parameters); one of
    the whole batch is already rounded. Autograd must not convert it: a conversion loses the operator's
    mark, [Note: one delivery per parameter].

    Raises:
        ArgumentError: A parameter still has a gradient.
    """
    check_no_leftover_gradients(parameters)
    for parameter in parameters if batch.shares > 1 else ():
        parameter.grad_dtype = accumulation_dtype(parameter.dtype)


def restore_grad_dtype(parameters: list[nn.Parameter]) -> None:
    """Give gradients the dtype of their parameters again."""
    for parameter in parameters:
        parameter.grad_dtype = parameter.dtype


def own_gradient(parameter: Tensor) -> Tensor:
    """Return `p.grad` in memory that may be written to: autograd may deliver an expanded view."""
    grad = parameter.grad
    assert grad is not None
    return grad.contiguous()
