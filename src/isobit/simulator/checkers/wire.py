"""Looks at what ranks send: bits that change on their way, buffers changed too early, the first NaN."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from isobit import bits
from isobit.errors import (
    ArgumentError,
    CorruptionError,
    NonFiniteError,
    PendingError,
    SimulationError,
)

if TYPE_CHECKING:
    from isobit.simulator.checkers.training import Training
    from isobit.simulator.collectives import Call
    from isobit.simulator.network import Message, Operation, Receive

CHOICES = ("bits", "finite", "reads", "training")


def mark_of(tensor: Tensor) -> int | str:
    """Changes when the tensor is written to: torch's own count, unless memory beside it shares that count."""
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        return bits.digest(tensor)
    return 0 if tensor.is_inference() else tensor._version


Seen = list[tuple[Tensor, int | str, Tensor | None]]


def look_at(tensors: Sequence[Tensor], sent: Sequence[Tensor] = ()) -> Seen:
    """What a call is under way with: each tensor with its mark and, where a copy travels, the copy."""
    copies: Sequence[Tensor | None] = sent or [None] * len(tensors)
    return [(tensor, mark_of(tensor), copy) for tensor, copy in zip(tensors, copies, strict=True)]


def find_change(seen: Seen) -> int | None:
    """The first tensor that was written to since it was looked at."""
    for at, (tensor, mark, copy) in enumerate(seen):
        if tensor.untyped_storage().nbytes() < tensor.nbytes:  # its memory was given up
            return at
        if mark_of(tensor) != mark or (
            copy is not None and not bits.equal(tensor.detach().reshape(copy.shape), copy)
        ):
            return at
    return None


class Watch:
    """Findings about data; `bits` and `finite` read every tensor that is sent, so they are asked for by name."""

    def __init__(self, chosen: Collection[str], findings: list[SimulationError]) -> None:
        if not set(chosen) <= set(CHOICES):
            raise ArgumentError(
                expected=f"watch out of {', '.join(CHOICES)}",
                received=str(tuple(chosen)),
                remedy="name these only",
            )
        self.chosen, self.findings = frozenset(chosen), findings
        self._first_nan = True
        self.training: Training | None = None

    def depart(self, call: Call, what: str) -> None:
        """As a rank makes its call."""
        call.marks = (
            [mark_of(tensor) for tensor in call.inputs]
            if call.asynchronous and call.sent is None
            else []
        )
        if not self.chosen:
            return
        if self.training is not None:
            self.training.note_call(call)
        if "bits" in self.chosen:
            call.digests = [bits.digest(tensor) for tensor in call.inputs]
        if "finite" in self.chosen and self._first_nan:
            for tensor in call.inputs:
                if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
                    self._first_nan = False
                    self.findings.append(non_finite(call, tensor, what))
                    return

    def arrive(self, operation: Operation, call: Call) -> None:
        """As the collective is carried out."""
        watched = call.marks and call.sent is None
        if watched and [mark_of(tensor) for tensor in call.inputs] != call.marks:
            self.findings.append(changed_early(operation, call))
        elif call.digests and [bits.digest(tensor) for tensor in call.carried] != call.digests:
            self.findings.append(
                corrupted(call.rank, f"its part in {operation.describe()}", call.site)
            )

    def hop(
        self, operation: Operation, sender: int, before: Tensor, after: Tensor, site: str
    ) -> None:
        """The last hop of a result to one rank."""
        if "bits" in self.chosen and not bits.equal(before, after):
            self.findings.append(corrupted(sender, f"the result of {operation.describe()}", site))

    def deliver(self, receive: Receive, message: Message) -> None:
        if self.training is not None:
            self.training.note_message(message.sender, receive.group.members[receive.member])
        if (
            message.digests
            and [bits.digest(tensor) for tensor in message.tensors] != message.digests
        ):
            receiver = receive.group.members[receive.member]
            self.findings.append(
                corrupted(message.sender, f"its message to rank {receiver}", message.site)
            )


def non_finite(call: Call, tensor: Tensor, what: str) -> NonFiniteError:
    at = int((~tensor.detach().isfinite()).reshape(-1).int().argmax())
    value = tensor.detach().reshape(-1)[at].item()
    return NonFiniteError(
        expected=f"finite numbers from rank {call.rank} in {what}",
        received=f"{value} at element {at} of {tuple(tensor.shape)}",
        remedy=f"rank {call.rank} is the first to send one: look for its source there",
        ranks=[call.rank],
        stacks={call.rank: [call.site]},
    )


def changed_early(operation: Operation, call: Call) -> PendingError:
    return PendingError(
        expected=f"the input of rank {call.rank} to {operation.describe()} left alone until wait()",
        received="an in-place change before the others had read it",
        remedy="call .wait() first, or send a clone",
        ranks=[call.rank],
        stacks={call.rank: [call.site]},
    )


def overwritten(
    rank: int, what: str, site: str, tensor: Tensor, at: int, stack: Sequence[str]
) -> PendingError:
    """A buffer of a call that was written to between the call and its wait."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return PendingError(
        expected=f"buffer {at} of rank {rank} ({shape} {dtype}) in {what} left alone until wait()",
        received=f"a write to it before wait(); the call was at {site}",
        remedy="call .wait() first, or pass a clone",
        ranks=[rank],
        stacks={rank: stack},
    )


def corrupted(rank: int, what: str, site: str) -> CorruptionError:
    return CorruptionError(
        expected=f"from rank {rank}, the bits that it sent as {what}",
        received="others",
        remedy=f"suspect the link or the memory of rank {rank}",
        ranks=[rank],
        stacks={rank: [site]},
    )
