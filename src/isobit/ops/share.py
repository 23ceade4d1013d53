"""Which share of a global batch is under way, and whether a parameter's gradient may be taken of it.

[Note: one delivery per parameter] A share's gradient of a parameter is one subtree of the sample tree only if one
isobit operator computed it from exactly the samples of the share. Three places see to it:

1. Forward: `check_share` compares the samples of a call with the share that is collected.
2. Backward: `as_partial` marks the gradient that the operator returns, with the share of its forward and the tensor's
   version. Autograd adds the contributions of several uses, in place or into a new tensor: either loses the mark.
3. Delivery: a hook of isobit.parallel.data.gradient_checks refuses a gradient without a valid mark.

Recomputation under gradient checkpointing marks the same gradient, and calls without gradients mark nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.order.samples import Samples, segment_size

REMEDY = "train through isobit.parallel.Gradients"
SAY_SAMPLES = (
    "pass samples=isobit.Samples.packed(lengths, first=share.first, of=share.of) of the share that "
    "`with gradients.micro_batch(i) as share` gives; run what is not trained under torch.no_grad()"
)
UNCOMPILED = "leave torch.compile out of what Gradients collects: torch.compiler.disable(function)"
_MARK = "_isobit_partial"


@dataclass(frozen=True)
class Share:
    """A run of the global batch's samples: `first` of them come before it, `of` are in the batch, `size` are in it."""

    first: int
    of: int
    size: int
    used: set[int] = field(
        default_factory=set, init=False, repr=False, compare=False
    )  # ids of trained parameters


_in_force: ContextVar[Share | None] = ContextVar("isobit_share", default=None)


@contextmanager
def collecting(share: Share) -> Iterator[Share]:
    """Whoever opens this takes each parameter's fp32 gradient of this share, and merges it with the other shares'."""
    token = _in_force.set(share)
    try:
        yield share
    finally:
        _in_force.reset(token)


def share_in_force() -> Share | None:
    """The share that is being collected here, if any; compiled code cannot ask, and its gradients carry no mark."""
    return None if torch.compiler.is_compiling() else _in_force.get()


def check_share(samples: Samples, *parameters: Tensor | None) -> None:
    """A share's gradients are partials: autograd may deliver them to a collector alone, unrounded, one subtree each."""
    share = share_in_force()
    if not torch.is_grad_enabled() or (share is None and not samples.is_share):
        return
    wanted = [p for p in parameters if p is not None and p.requires_grad]
    if not wanted:
        return
    if samples.is_share:
        check_subtree(samples)
    if share != Share(samples.first, samples.of, len(samples.spans)):
        raise UnsupportedError(
            expected="parameter gradients over the whole global batch, or a collector of this share",
            received=f"{name_share(samples)}, while {share or 'no share'} is collected",
            remedy=UNCOMPILED
            if torch.compiler.is_compiling()
            else REMEDY
            if share is None
            else SAY_SAMPLES,
        )
    for parameter in wanted if samples.is_share else ():
        check_unrounded(parameter)
    share.used.update(map(id, wanted))


def check_default(rows: Tensor, *parameters: Tensor | None) -> None:
    """The same of a call without samples=, which says that its rows are the whole global batch."""
    share = share_in_force()
    if share is None or not torch.is_grad_enabled():
        return
    wanted = [p for p in parameters if p is not None and p.requires_grad]
    if not wanted:
        return
    count = rows.shape[:-2].numel() if rows.dim() > 2 else 1
    if share != Share(0, count, count):
        raise UnsupportedError(
            expected=f"samples= for each call that trains parameters while {share} is collected",
            received=f"a call without samples=, which reads {list(rows.shape)} as all {count} samples of a batch",
            remedy=SAY_SAMPLES,
        )
    share.used.update(map(id, wanted))


def as_partial(grad: Tensor, share: Share | None) -> Tensor:
    """Marks a parameter's gradient as one operator's, of the share that was collected in its forward."""
    if share is not None:
        setattr(grad, _MARK, (share, grad._version))
    return grad


def is_partial(grad: Tensor, share: Share) -> bool:
    """Whether this is a gradient that `as_partial` marked for this share, with nothing added to it since."""
    known, version = getattr(grad, _MARK, (None, 0))
    return known is share and version == grad._version


def check_subtree(samples: Samples) -> None:
    """A share is merged by others as one value, so it must be one."""
    if (
        len(samples.roots) != 1
        or len(samples.spans) % segment_size(samples.of)
        or len(samples.spans) > samples.of
    ):
        raise UnsupportedError(
            expected="a share that is one subtree of the samples' tree",
            received=f"{name_share(samples)}, which are {len(samples.roots)} subtrees of whole segments",
            remedy="take a power of two of segments, from a multiple of it; or take each subtree by itself",
        )


def name_share(samples: Samples) -> str:
    """For a refusal."""
    return f"samples {samples.first} to {samples.first + len(samples.spans)} of {samples.of}"


def check_unrounded(parameter: Tensor) -> None:
    """Only a leaf keeps a gradient of another dtype than its own."""
    wide = accumulation_dtype(parameter.dtype)
    if not parameter.is_leaf or parameter.grad_dtype != wide:
        received = str(parameter.grad_dtype) if parameter.is_leaf else "a result of other operators"
        of_leaf = "train the parameter itself: without autocast, parametrizations or a weight that is computed"
        raise UnsupportedError(
            expected=f"a leaf parameter whose grad_dtype is {wide}, since a share's gradient is not rounded",
            received=received,
            remedy=REMEDY if parameter.is_leaf else of_leaf,
        )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtype(dtype: torch.dtype, samples: int, of: int) -> torch.dtype:
    """A parameter's gradient over `samples` of the `of` (0: just these) in the global batch: a share's is unrounded."""
    return dtype if of in (0, samples) else accumulation_dtype(dtype)


def described_dtype(dtype: torch.dtype, spans: Tensor | None, of: int) -> torch.dtype:
    """The same of samples as the operators are told them: without spans, the tensors hold the whole batch."""
    return dtype if spans is None else gradient_dtype(dtype, spans.shape[0], of)
