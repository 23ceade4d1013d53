"""The interface of a gradient reducer. There is one each for a plain model, DDP and FSDP2."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from isobit.order.tree import Node


class GradientReducer(Protocol):
    """Accumulates gradients over micro-batches and reduces them over ranks.

    `Gradients` calls `begin` and `end` around each micro-batch. `node` is the subtree of the sample
    tree that the micro-batch sums; `last` is true for the last micro-batch of the step.
    """

    @property
    def peak_bytes(self) -> int:
        """The largest memory of partial gradients at the end of any micro-batch so far."""

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """The tensors to which autograd delivers gradients, with their names."""

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        """Prepare for the forward; the context is open during forward and backward."""

    def end(self, node: Node, last: bool) -> None:
        """Finish after the backward; after the last one every `p.grad` is complete and rounded."""

    def clear(self) -> None:
        """Drop everything of this step, after a failure."""

    def close(self) -> None:
        """Remove all hooks from the model."""
