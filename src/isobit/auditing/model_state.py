"""Leave a model as it was: its gradients and buffers, which the runs of an audit change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put gradients and buffers back, such as the running statistics of a batch norm in training."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
