"""`keyed_dropout`: dropout whose mask is a function of a key, so that it does not depend on the batch.

[Note: the key of a mask] An element is kept or dropped by (seed, step, sample of the global batch, position in the
sample, module, channel), hashed as in drawing.py. Rows of the batch, padding, packing, ranks
and micro-batches are not in the key, and no generator is read or advanced: the same element has the same mask wherever
it is computed, and again where gradient checkpointing recomputes it. A mask that is keyed by the row of the batch would
give the first sample of every micro-batch and rank the same mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.share import share_in_force
from isobit.sampling.drawing import (
    GOLDEN,
    Whole,
    as_int64,
    mix,
    per_row,
    request_number,
    shift_right,
)

BITS = 53  # of a key that decide: p is compared as a whole multiple of 2^-53


@dataclass(frozen=True)
class DropoutKey:
    """The part of a mask's key that a training loop knows, see `dropout_key`."""

    seed: int
    step: int
    first: int | None = None

    def first_sample(self) -> int:
        """Return the index in the global batch of the first sample of a call, or raise if it is not known."""
        share = share_in_force()
        if share is not None:
            if self.first not in (None, share.first):
                raise ArgumentError(
                    expected=f"first={share.first}, as the share that isobit.parallel.Gradients collects",
                    received=f"first={self.first}",
                    remedy="leave first= out inside of Gradients.micro_batch",
                )
            return share.first
        if self.first is not None:
            return self.first
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UnsupportedError(
                expected="the index in the global batch of each sample that is dropped from",
                received=f"a call on one of {dist.get_world_size()} ranks, outside of isobit.parallel.Gradients",
                remedy="train through isobit.parallel.Gradients; or pass dropout_key(..., first=) the index of this "
                "rank's first sample",
            )
        return 0


_in_force: ContextVar[DropoutKey | None] = ContextVar("isobit_dropout_key", default=None)


@contextmanager
def dropout_key(seed: int, step: int, *, first: int | None = None) -> Iterator[DropoutKey]:
    """Give the calls of an enabled model inside the block the key of their dropout masks.

    `isobit.integrations.transformers.OrderedTrainer` opens it by itself. Inside `isobit.parallel.Gradients.micro_batch`
    samples are counted in the global batch; elsewhere the samples of a call are counted from `first`. Two calls with
    the same numbers have the same masks.

    Args:
        seed: The seed of all masks.
        step: The number of the optimizer step: each step has masks of its own.
        first: The index in the global batch of a call's first sample, where `Gradients` does not count: 0 by default on
            one rank, and required on several.

    Returns:
        A context manager.

    Raises:
        ArgumentError: If a number is not a whole one.

    Example:
        >>> with isobit.sampling.dropout_key(seed=7, step=3) as key:
        ...     print(key.step)
        3
    """
    for name, value in (("seed", seed), ("step", step), ("first", 0 if first is None else first)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentError(
                expected=f"{name}: a whole number", received=repr(value), remedy=f"pass int({name})"
            )
    token = _in_force.set(DropoutKey(seed, step, first))
    try:
        yield _in_force.get()  # type: ignore[misc]
    finally:
        _in_force.reset(token)


def dropout_key_in_force() -> DropoutKey | None:
    """Return the key of the `dropout_key` block that is open, if any."""
    return _in_force.get()


def keyed_dropout(
    x: Tensor,
    p: float,
    *,
    seed: int,
    step: int,
    samples: Whole,
    positions: Whole,
    module: str,
) -> Tensor:
    """Drop elements of x by a key, and scale the others by 1 / (1 - p); see [Note: the key of a mask].

    The gradient has the same mask. Elements that are dropped are +0, whatever they were.

    Args:
        x: Shape [..., channels].
        p: The probability of being dropped, in [0, 1).
        seed: The seed of all masks.
        step: The number of the optimizer step.
        samples: The index in the global batch of each row's sample; rows are those of x.reshape(-1, channels).
        positions: The position of each row in its sample, without padding.
        module: The name of the module that drops.

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        ArgumentError: If p is out of range, or samples or positions are not one per row.

    Example:
        >>> x = torch.ones(2, 3, 8)
        >>> asked = dict(seed=7, step=0, module="layers.0.q_proj")
        >>> whole = isobit.sampling.keyed_dropout(
        ...     x, 0.5, samples=[4, 4, 4, 5, 5, 5], positions=[0, 1, 2, 0, 1, 2], **asked)
        >>> alone = isobit.sampling.keyed_dropout(x[1, 2:], 0.5, samples=5, positions=2, **asked)
        >>> torch.equal(whole[1, 2:], alone)
        True
    """
    rows = x.shape[:-1].numel()
    return drop(x, p, row_keys(seed, step, samples, positions, rows).to(x.device), module)


def row_keys(seed: int, step: int, samples: Whole, positions: Whole, rows: int) -> Tensor:
    """Return the part of the key that all modules share, int64 [rows]."""
    key = torch.full((rows,), GOLDEN, dtype=torch.int64)
    parts = {"seed": seed, "step": step, "samples": samples, "positions": positions}
    for name, part in parts.items():
        key = mix((key ^ per_row(name, part, rows)) + GOLDEN)
    return key


def drop(x: Tensor, p: float, keys: Tensor, module: str) -> Tensor:
    """Drop elements of x [..., channels] by the keys of its rows and the module's name."""
    if not 0 <= p < 1:
        raise ArgumentError(
            expected="a probability in [0, 1)", received=f"p={p}", remedy="pass 0 to drop nothing"
        )
    keep = kept(p, keys, module, x.shape[-1]).view(x.shape)
    return torch.where(keep, x, 0.0) * (1.0 / (1.0 - p))


def kept(p: float, keys: Tensor, module: str, channels: int) -> Tensor:
    """Return which elements are kept, [rows, channels]: those whose key is at least p."""
    named = mix((keys ^ as_int64(request_number(module))) + GOLDEN)
    channel = torch.arange(channels, dtype=torch.int64, device=keys.device)
    number = mix((named.unsqueeze(1) ^ channel) + GOLDEN)
    found: Tensor = shift_right(number, 64 - BITS) >= math.ceil(p * 2**BITS)
    return found
