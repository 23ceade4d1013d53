"""Which share of a global batch is under way, and whether a parameter's gradient may be taken of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.order.samples import Samples, segment_size

REMEDY = "train through isobit.parallel.Gradients"


@dataclass(frozen=True)
class Share:
    """A run of the global batch's samples: `first` of them come before it, `of` are in the batch."""

    first: int
    of: int


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
    """The share that is being collected here, if any."""
    return _in_force.get()


def check_share(samples: Samples, *parameters: Tensor | None) -> None:
    """A share's gradients are partials: autograd may deliver them to a collector alone, unrounded, one subtree each."""
    if not (samples.is_share and torch.is_grad_enabled()):
        return
    wanted = [p for p in parameters if p is not None and p.requires_grad]
    if not wanted:
        return
    check_subtree(samples)
    if share_in_force() != Share(samples.first, samples.of):
        raise UnsupportedError(
            expected="parameter gradients over the whole global batch, or a collector of this share",
            received=f"{name_share(samples)}, while {share_in_force() or 'no share'} is collected",
            remedy=REMEDY,
        )
    for parameter in wanted:
        check_unrounded(parameter)


def check_subtree(samples: Samples) -> None:
    """A share is merged by others as one value, so it must be one."""
    if len(samples.roots) != 1 or len(samples.spans) % segment_size(samples.of) or len(samples.spans) > samples.of:
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
        raise UnsupportedError(
            expected=f"a leaf parameter whose grad_dtype is {wide}, since a share's gradient is not rounded",
            received=received,
            remedy=REMEDY,
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
