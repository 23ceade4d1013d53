"""Raise when an optimizer or clipping runs between micro-batches: gradients are not complete, and p.grad is None."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from isobit.errors import UnsupportedError

_unfinished: dict[int, weakref.ref[Unfinished]] = {}
_lock, _watching = threading.Lock(), False


class Unfinished:
    """A step of several micro-batches, whose parameters have no gradients until the last one has ended."""

    def __init__(self, parameters: Iterable[Tensor], micro_batches: int) -> None:
        watch_optimizers()
        self.parameters, self.micro_batches = {id(p) for p in parameters}, micro_batches
        self.micro_batch = 0  # the one that was begun last
        weakref.finalize(self, _unfinished.pop, id(self), None)

    def begin(self, micro_batch: int) -> None:
        """Note that a micro-batch begins."""
        self.micro_batch = micro_batch
        _unfinished[id(self)] = weakref.ref(self)

    def end(self) -> None:
        """Note that the gradients are complete, or that the step was discarded."""
        _unfinished.pop(id(self), None)


def watch_optimizers() -> None:
    """Check every optimizer's step from now on. The hook is never removed: it costs one lookup per step."""
    global _watching
    with _lock:
        if not _watching:
            register_optimizer_step_pre_hook(check_step)
            _watching = True


def check_step(optimizer: Optimizer, *_: Any) -> None:
    """Raise if an optimizer steps a parameter whose gradient is not complete."""
    if _unfinished:
        given = (p for group in optimizer.param_groups for p in group["params"])
        refuse_unfinished(f"{type(optimizer).__name__}.step()", given)


def refuse_unfinished(what: str, parameters: Iterable[Tensor]) -> None:
    """Raise for the call `what` before the last micro-batch has ended."""
    if not _unfinished:
        return
    given = {id(p) for p in parameters}
    for known in list(_unfinished.values()):  # a copy: other threads add and remove theirs
        step = known()
        if step is not None and not given.isdisjoint(step.parameters):
            raise UnsupportedError(
                expected=f"all {step.micro_batches} micro-batches of the step, each closed, before {what}",
                received=f"micro-batch {step.micro_batch} as the last one begun: parameters have no gradients yet",
                remedy="call it after the block of the last micro-batch; to skip a step, call Gradients.discard() "
                "instead of the optimizer",
            )
