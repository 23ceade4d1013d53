"""Element-wise additions of partial sums on one rank, with the same bits in every thread.

Subnormal numbers: torch.set_flush_denormal is a mode of a thread, and the threads of torch's pool
keep the mode that they started with. So tensors are added in blocks below torch's grain size, which
the calling thread adds by itself with subnormals kept.

NaNs: the bits of NaN + NaN and of inf - inf depend on the processor and on the order of operands.
`settle_nans` replaces every NaN by one. A NaN stays in a sum, so settling the last sum is enough.

Kernels: csrc/partial_sums.cpp adds and settles in one pass, and rounds to bf16 in one. It is used
where it has the bits of the definition below on hard inputs, which is looked at once per process;
elsewhere torch's operators serve, with the same bits.

GPUs: one addition of two fp32 values is rounded as IEEE 754 says, subnormals included, so torch's
own addition has the bits of a CPU. There are no threads and no modes, and so no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from isobit import bits
from isobit.foundation import machine, native
from isobit.ops.portable.sums import settle_nans

# torch's grain size: an addition of no more elements starts no threads.
BLOCK = 32768
KERNEL_DTYPES = (torch.float32, torch.float64)


@contextmanager
def subnormals_kept() -> Iterator[None]:
    """Keep subnormal numbers in this thread's additions, then restore its mode.

    Also a decorator: `@subnormals_kept()`. Unlike `isolation.keeping_subnormals` it starts no
    thread; it is for additions that never reach torch's thread pool.
    """
    flushing = machine.flushes_subnormals()
    if flushing:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)


def round_total(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a sum to its result's dtype and settle its NaNs; in place if it has that dtype."""
    if dtype == torch.bfloat16 and total.dtype == torch.float32:
        rounded = torch.empty_like(total, dtype=dtype)
        round_into(total, rounded)
        return rounded
    return settle_nans(total.to(dtype))


def round_into(total: Tensor, rounded: Tensor) -> None:
    """Round sums to the dtype of `rounded`, of the same shape, and settle their NaNs."""
    if _serves(total, rounded) and (total.dtype, rounded.dtype) == (torch.float32, torch.bfloat16):
        torch.ops.isobit.round_partials(total, rounded)
    else:
        settle_nans(rounded.copy_(total))


def block_of(tensor: Tensor) -> int:
    """Return how many elements are added at once: all of them on a GPU."""
    return max(tensor.numel(), 1) if tensor.is_cuda else BLOCK


def add_two(left: Tensor, right: Tensor, total: Tensor) -> None:
    """Write left + right to `total`; all are 1-D and of one length."""
    if _serves(left, right, total):
        torch.ops.isobit.add_partials(left, right, total, True)
        return
    add_by_torch(left, right, total)


def add_by_torch(left: Tensor, right: Tensor, total: Tensor) -> None:
    """Define `add_two` by torch's operators."""
    block = block_of(total)
    for at in range(0, total.numel(), block):
        part = slice(at, at + block)
        settle_nans(torch.add(left[part], right[part], out=total[part]))


def add_rows(rows: Sequence[Tensor], total: Tensor) -> None:
    """Write the balanced tree over 2^n rows, n > 0, to `total`; the rows are overwritten.

    Args:
        rows: By rank, its addends. # ranks x [numel]
        total: Receives the sum. # [numel]
    """
    block = block_of(total)
    for at in range(0, total.numel(), block):
        level = [row[at : at + block] for row in rows]
        while len(level) > 2:
            level = [
                torch.add(left, right, out=left)
                for left, right in zip(level[::2], level[1::2], strict=True)
            ]
        settle_nans(torch.add(level[0], level[1], out=total[at : at + block]))


def add_into(left: Tensor, right: Tensor) -> Tensor:
    """Add `right` to `left` in place; both contiguous. NaNs are not settled."""
    if left.dtype in KERNEL_DTYPES and _serves(left, right):
        torch.ops.isobit.add_partials(left, right, left, False)
        return left
    with subnormals_kept():
        for ours, theirs in zip(_blocks(left), _blocks(right), strict=True):
            ours.add_(theirs)
    return left


def add_to_rows(rows: Tensor, row: Tensor) -> None:
    """Add `row` [N] to each row of `rows` [..., N] in place; both contiguous."""
    with subnormals_kept():
        for one in rows.view(-1, rows.shape[-1]):
            for ours, theirs in zip(_blocks(one), _blocks(row), strict=True):
                ours.add_(theirs)


def _serves(*tensors: Tensor) -> bool:
    return all(t.is_cpu and t.is_contiguous() for t in tensors) and kernels_agree()


@lru_cache(maxsize=1)
def kernels_agree() -> bool:
    """Return whether the kernels exist and have the bits of torch's operators on hard inputs."""
    if native.load() is not None or not hasattr(torch.ops.isobit, "round_partials"):
        return False
    with subnormals_kept(), torch.no_grad():
        for dtype in KERNEL_DTYPES:
            left, right = hard_values(dtype), hard_values(dtype).roll(37)
            wanted, found = torch.empty_like(left), torch.empty_like(left)
            add_by_torch(left, right, wanted)
            torch.ops.isobit.add_partials(left, right, found, True)
            if not bits.equal(found, wanted):
                return False
        total, rounded = hard_values(torch.float32), hard_values(torch.bfloat16)
        torch.ops.isobit.round_partials(total, rounded)
        return bits.equal(rounded, settle_nans(total.to(torch.bfloat16)))


def hard_values(dtype: torch.dtype) -> Tensor:
    """Return values of every exponent, ties, both zeros, infinities and NaNs of several kinds."""
    words = torch.arange(1 << 16, dtype=torch.int64)
    ends = words * 2654435761 % (1 << 16)  # the lower half of each word
    ends[::3], ends[1::3] = 1 << 15, 0  # ties, and values that need no rounding
    narrow = ((words << 16 | ends) & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
    return narrow.to(dtype)


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.numel() <= BLOCK or tensor.is_cuda:
        return (tensor,)
    return torch.split(tensor.view(-1), BLOCK)
