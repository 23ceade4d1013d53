"""Overwritten buffers: writes to an input or output of a call between the call and its `wait()`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from isobit import bits
from isobit.errors import PendingError
from isobit.simulator.collectives import Call
from isobit.simulator.operations import Operation

# Each tensor with its mark and, if a copy of it is in transit, that copy.
Snapshot = list[tuple[Tensor, int | str, Tensor | None]]


def mark_of(tensor: Tensor) -> int | str:
    """Return a mark that changes when the tensor is written to.

    It is torch's version counter, or the digest if other tensors of the same storage share that counter.
    """
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        return bits.digest(tensor)
    return 0 if tensor.is_inference() else tensor._version


def take_snapshot(tensors: Sequence[Tensor], sent: Sequence[Tensor] = ()) -> Snapshot:
    """Mark the tensors of a call that is in progress."""
    copies: Sequence[Tensor | None] = sent or [None] * len(tensors)
    return [(tensor, mark_of(tensor), copy) for tensor, copy in zip(tensors, copies, strict=True)]


def find_change(snapshot: Snapshot) -> int | None:
    """Return the index of the first tensor that was written to since the snapshot."""
    for at, (tensor, mark, copy) in enumerate(snapshot):
        if tensor.untyped_storage().nbytes() < tensor.nbytes:  # its memory was freed
            return at
        if mark_of(tensor) != mark or (
            copy is not None and not bits.equal(tensor.detach().reshape(copy.shape), copy)
        ):
            return at
    return None


def changed_early(operation: Operation, call: Call) -> PendingError:
    """Report an input that was changed before the other ranks had read it."""
    return PendingError(
        expected=f"the input of rank {call.rank} to {operation.describe()} unchanged until wait()",
        received="an in-place change before the other ranks had read it",
        remedy="call .wait() first, or send a clone",
        ranks=[call.rank],
        stacks={call.rank: [call.site]},
    )


def find_shared_output(call: Call, what: str) -> PendingError | None:
    """Report two results of one call that would be written to the same memory, as `[torch.empty(2)] * n` has."""
    seen: dict[int, int] = {}
    for at, output in enumerate(call.outputs):
        first = seen.setdefault(output.data_ptr(), at) if output.numel() else at
        if first != at:
            return PendingError(
                expected=f"memory of its own for each result of {what} on rank {call.rank}",
                received=f"results {first} and {at} in the same memory: one overwrites the other",
                remedy="allocate them one by one: [torch.empty_like(x) for _ in range(world_size)]",
                ranks=[call.rank],
                stacks={call.rank: list(call.stack) or [call.site]},
            )
    return None


def overwritten(
    rank: int, what: str, site: str, tensor: Tensor, at: int, stack: Sequence[str]
) -> PendingError:
    """Report a buffer that was written to between the call and its `wait()`."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return PendingError(
        expected=f"buffer {at} of rank {rank} ({shape} {dtype}) in {what} unchanged until wait()",
        received=f"a write to it before wait(); the call was at {site}",
        remedy="call .wait() first, or pass a clone",
        ranks=[rank],
        stacks={rank: stack},
    )
