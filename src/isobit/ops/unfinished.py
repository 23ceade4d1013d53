"""Steps whose gradients are not complete yet: optimizers and clipping refuse them, since p.grad is still None."""

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
    """Says, between the first and the last micro-batch of a step, that the parameters have no gradients yet."""

    def __init__(self, parameters: Iterable[Tensor], micro_batches: int) -> None:
        watch_optimizers()
        self.parameters, self.micro_batches = {id(p) for p in parameters}, micro_batches
        self.micro_batch = 0  # the one that was begun last
        weakref.finalize(self, _unfinished.pop, id(self), None)

    def begin(self, micro_batch: int) -> None:
        """A micro-batch begins."""
        self.micro_batch = micro_batch
        _unfinished[id(self)] = weakref.ref(self)

    def end(self) -> None:
        """The gradients are complete, or the step was given up."""
        _unfinished.pop(id(self), None)


def watch_optimizers() -> None:
    """Looks at every optimizer's step, from the first call on. It stays: between steps it costs one lookup."""
    global _watching
    with _lock:
        if not _watching:
            register_optimizer_step_pre_hook(check_step)
            _watching = True


def check_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuses a step of an optimizer that holds a parameter whose gradient is not complete."""
    if _unfinished:
        given = (p for group in optimizer.param_groups for p in group["params"])
        refuse_unfinished(f"{type(optimizer).__name__}.step()", given)


def refuse_unfinished(what: str, parameters: Iterable[Tensor]) -> None:
    """Refuses `what` before the last micro-batch has ended."""
    if not _unfinished:
        return
    given = {id(p) for p in parameters}
    for known in list(_unfinished.values()):  # a copy: other threads begin and end theirs
        step = known()
        if step is not None and not given.isdisjoint(step.parameters):
            raise UnsupportedError(
                expected=f"all {step.micro_batches} micro-batches of the step, each closed, before {what}",
                received=f"micro-batch {step.micro_batch} as the last one begun: parameters have no gradients yet",
                remedy="call it after the block of the last micro-batch; to skip a step, call Gradients.discard() "
                "and no optimizer",
            )
