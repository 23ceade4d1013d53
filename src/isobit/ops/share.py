"""The share of a global batch whose gradients are being collected, and the checks that gradients fit to it.

See [Note: shares of a global batch] in isobit/order/samples.py for what a share is.

[Note: one delivery per parameter] A share's gradient of a parameter is one subtree of the sample tree only if one
isobit operator computed it from exactly the samples of the share. Three places check that:

1. Forward: `check_share` compares the samples of a call with the share that is collected.
2. Backward: `as_partial` marks the gradient that the operator returns with the share of its forward and the tensor's
   version. Where a parameter is used several times, autograd adds the gradients, in place or into a new tensor; both
   invalidate the mark.
3. Delivery: a hook of isobit.parallel.data.gradients raises for a gradient without a valid mark.

Recomputation under gradient checkpointing marks the same gradient, and calls without gradients mark nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from isobit.errors import UnsupportedError
from isobit.foundation.renaming import keeps_old_attribute
from isobit.order.samples import Samples, segment_size

REMEDY = "train through isobit.parallel.Gradients"
PASS_SAMPLES = (
    "pass samples=isobit.Samples.packed(lengths, first=share.first, total=share.total) of the share that "
    "`with gradients.micro_batch(i) as share` gives; run what is not trained under torch.no_grad()"
)
UNCOMPILED = "leave torch.compile out of what Gradients collects: torch.compiler.disable(function)"
_MARK = "_isobit_partial"


@keeps_old_attribute("of", "total")
@dataclass(frozen=True)
class Share:
    """A run of `size` samples of a global batch of `total`; `first` samples come before it."""

    first: int
    total: int
    size: int
    # ids of the parameters that operators have used while the share was collected
    used: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    # the shares of several ranks that compute an operator together, of which this is one
    groups: dict[tuple[int, int], Share] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of_group(self, first: int, size: int) -> Share:
        """Return the share of several ranks, of which this is one; the same object at each call."""
        return self.groups.setdefault((first, size), Share(first, self.total, size))


_in_force: ContextVar[Share | None] = ContextVar("isobit_share", default=None)


@contextmanager
def collecting(share: Share) -> Iterator[Share]:
    """Declare that the caller collects each parameter's fp32 gradient of this share and merges it with the others."""
    token = _in_force.set(share)
    try:
        yield share
    finally:
        _in_force.reset(token)


def share_in_force() -> Share | None:
    """Return the share that is being collected, if any; None in compiled code, whose gradients have no mark."""
    return None if torch.compiler.is_compiling() else _in_force.get()


def check_share(samples: Samples, *parameters: Tensor | None) -> None:
    """Raise unless gradients of these samples may be taken: of the whole batch, or of the share being collected."""
    share = share_in_force()
    if not torch.is_grad_enabled() or (share is None and not samples.is_share):
        return
    wanted = [p for p in parameters if p is not None and p.requires_grad]
    if not wanted:
        return
    if samples.is_share:
        check_subtree(samples)
    if share != Share(samples.first, samples.total, len(samples.spans)):
        raise UnsupportedError(
            expected="parameter gradients over the whole global batch, or a collector of this share",
            received=f"{name_share(samples)}, while {share or 'no share'} is collected",
            remedy=UNCOMPILED
            if torch.compiler.is_compiling()
            else REMEDY
            if share is None
            else PASS_SAMPLES,
        )
    for parameter in wanted if samples.is_share else ():
        check_unrounded(parameter)
    share.used.update(map(id, wanted))


def check_default(rows: Tensor, *parameters: Tensor | None) -> None:
    """Raise as `check_share` does, for a call without samples=, whose rows are the whole global batch."""
    if not torch.is_grad_enabled():
        return
    share = share_in_force()
    if share is None:
        return
    wanted = [p for p in parameters if p is not None and p.requires_grad]
    if not wanted:
        return
    count = rows.shape[:-2].numel() if rows.dim() > 2 else 1
    if share != Share(0, count, count):
        raise UnsupportedError(
            expected=f"samples= for each call that trains parameters while {share} is collected",
            received=f"a call without samples=, which takes {list(rows.shape)} as all {count} samples of a batch",
            remedy=PASS_SAMPLES,
        )
    share.used.update(map(id, wanted))


def as_partial(grad: Tensor, share: Share | None) -> Tensor:
    """Mark a parameter's gradient as computed by one operator, for the share that was collected in its forward."""
    if share is not None:
        setattr(grad, _MARK, (share, grad._version))
    return grad


def marking_partials(output: Tensor) -> Tensor:
    """Return an operator's output, whose node will mark the gradients of the operator's parameters as partial.

    A parameter is every argument but the first. The formulas in csrc/derivatives.cpp know nothing of shares.
    """
    share = share_in_force()
    if share is None or output.grad_fn is None:
        return output

    def mark(grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> None:
        for grad in grads[1:]:
            if grad is not None:
                as_partial(grad, share)

    output.grad_fn.register_hook(mark)
    return output


def is_partial(grad: Tensor, share: Share) -> bool:
    """Return whether `as_partial` marked this gradient for this share, and nothing was added to it since."""
    known, version = getattr(grad, _MARK, (None, 0))
    return known is share and version == grad._version


def check_subtree(samples: Samples) -> None:
    """Raise unless a share is one subtree of the sample tree: it is merged with others as one value."""
    if (
        len(samples.roots) != 1
        or len(samples.spans) % segment_size(samples.total)
        or len(samples.spans) > samples.total
    ):
        raise UnsupportedError(
            expected="a share that is one subtree of the samples' tree",
            received=f"{name_share(samples)}, which are {len(samples.roots)} subtrees of whole segments",
            remedy="take a power of two of segments that starts at a multiple of itself; or split the share",
        )


def name_share(samples: Samples) -> str:
    """Return a description for error messages."""
    return f"samples {samples.first} to {samples.first + len(samples.spans)} of {samples.total}"


def check_unrounded(parameter: Tensor) -> None:
    """Raise unless a parameter can have an unrounded gradient: only a leaf may have one of another dtype."""
    wide = accumulation_dtype(parameter.dtype)
    if not parameter.is_leaf or parameter.grad_dtype != wide:
        received = str(parameter.grad_dtype) if parameter.is_leaf else "a result of other operators"
        of_leaf = (
            "train the parameter itself: without autocast, parametrizations or a computed weight"
        )
        raise UnsupportedError(
            expected=f"a leaf parameter whose grad_dtype is {wide}, since a share's gradient is not rounded",
            received=received,
            remedy=REMEDY if parameter.is_leaf else of_leaf,
        )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtype(dtype: torch.dtype, samples: int, of: int) -> torch.dtype:
    """Return the dtype of a parameter's gradient over `samples` of the `of` samples of the global batch.

    The gradient of a share is not rounded. `of` = 0 means that the samples are the whole batch.
    """
    return dtype if of in (0, samples) else accumulation_dtype(dtype)


def described_dtype(dtype: torch.dtype, spans: Tensor | None, of: int) -> torch.dtype:
    """Return `gradient_dtype` from an operator's raw arguments. `spans=None` means the call has the whole batch."""
    return dtype if spans is None else gradient_dtype(dtype, spans.shape[0], of)


# Raise when an optimizer or clipping runs between micro-batches: gradients are not complete, and p.grad is None.

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
