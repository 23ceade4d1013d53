"""Warn when autograd accumulates gradients of several calls: the sum then depends on how the batch was divided."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobit.integrations.transformers.strictness import tensors_of
from isobit.ops.share import share_in_force

if TYPE_CHECKING:
    from isobit.integrations.transformers.state import State

MESSAGE = (
    "isobit: a backward pass adds to gradients that the model holds already. Autograd adds these rounded gradients, so "
    "the result depends on how the batch was divided (gradient_accumulation_steps). Use one batch per step, or train "
    "through isobit.parallel.Gradients, whose result does not depend on it (docs/how-to/train-over-ranks.md)."
)


def warn_at_backward(state: State, model: nn.Module, output: Any) -> None:
    """Warn, once per model, when backward of this output begins while the model holds gradients."""
    if (
        state.warned_of_accumulation
        or not (model.training and torch.is_grad_enabled())
        or share_in_force() is not None
    ):
        return
    first = next(
        (tensor for tensor in tensors_of(output) if tensor.requires_grad and not tensor.is_leaf),
        None,
    )
    if first is not None:
        first.register_hook(partial(warn_if_held, weakref.ref(state), weakref.ref(model)))  # type: ignore[no-untyped-call]


def warn_if_held(of_state: Any, of_model: Any, _: Tensor) -> None:
    """Warn if the model holds gradients.

    Only the smallest is read. Zeros, as of zero_grad(set_to_none=False), change nothing.
    """
    state, model = of_state(), of_model()
    if state is None or model is None or state.warned_of_accumulation:
        return
    # Of a sharded gradient the local part: ranks must not exchange anything here.
    held = [
        getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None
    ]
    if held and bool(min(held, key=Tensor.numel).any()):
        state.warned_of_accumulation = True
        warnings.warn(MESSAGE, stacklevel=2)
