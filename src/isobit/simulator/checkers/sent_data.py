"""Data that ranks send: bits that change in transit, and the first NaN or infinity."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from isobit import bits
from isobit.errors import ArgumentError, CorruptionError, NonFiniteError
from isobit.simulator.checkers.pending_buffers import changed_early, mark_of
from isobit.simulator.checkers.training import Training
from isobit.simulator.collectives import Call, Message, Operation, Receive
from isobit.simulator.findings import Findings

WATCHES = ("bits", "finite", "reads", "training", "devices")


class DataWatch:
    """Check the data of every call. Watching "bits" or "finite" reads each tensor that is sent."""

    def __init__(
        self, chosen: Collection[str], findings: Findings, training: Training | None
    ) -> None:
        """Check the names in `chosen` and start with no findings."""
        if not set(chosen) <= set(WATCHES):
            raise ArgumentError(
                expected=f"watch with names out of {', '.join(WATCHES)}",
                received=str(tuple(chosen)),
                remedy="leave the other names out",
            )
        self.chosen, self.findings, self.training = frozenset(chosen), findings, training
        self._all_finite = True

    def on_call(self, call: Call, what: str) -> None:
        """Record marks and digests of the inputs when a rank makes a call."""
        if call.asynchronous and call.sent is None:
            call.marks = [mark_of(tensor) for tensor in call.sources]
        if not self.chosen:
            return
        if self.training is not None:
            self.training.note_call(call)
        if "bits" in self.chosen:
            call.digests = [bits.digest(tensor) for tensor in call.inputs]
        if "finite" in self.chosen and self._all_finite:
            for tensor in call.inputs:
                if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
                    self._all_finite = False
                    self.findings.note(non_finite(call, tensor, what))
                    return

    def on_complete(self, operation: Operation, call: Call) -> None:
        """Compare the inputs of a call with their marks and digests when the collective is carried out."""
        watched = call.marks and call.sent is None
        if watched and [mark_of(tensor) for tensor in call.sources] != call.marks:
            self.findings.note(changed_early(operation, call))
        elif call.digests and [bits.digest(tensor) for tensor in call.carried] != call.digests:
            what = f"its input to {operation.describe()}"
            self.findings.note(corrupted(call.rank, what, call.site))

    def on_result(
        self, operation: Operation, sender: int, before: Tensor, after: Tensor, site: str
    ) -> None:
        """Compare a result before and after its way to one rank."""
        if "bits" in self.chosen and not bits.equal(before, after):
            self.findings.note(corrupted(sender, f"the result of {operation.describe()}", site))

    def on_message(self, receive: Receive, message: Message) -> None:
        """Compare a message with its digests when it is received."""
        if self.training is not None:
            self.training.note_message(message.sender, receive.receiver)
        digests = message.digests
        if digests and [bits.digest(tensor) for tensor in message.tensors] != digests:
            what = f"its message to rank {receive.receiver}"
            self.findings.note(corrupted(message.sender, what, message.site))


def non_finite(call: Call, tensor: Tensor, what: str) -> NonFiniteError:
    """Report the first rank that sends a NaN or an infinity."""
    at = int((~tensor.detach().isfinite()).reshape(-1).int().argmax())
    value = tensor.detach().reshape(-1)[at].item()
    return NonFiniteError(
        expected=f"finite numbers from rank {call.rank} in {what}",
        received=f"{value} at element {at} of {tuple(tensor.shape)}",
        remedy=f"look for its source on rank {call.rank}, which is the first to send one",
        ranks=[call.rank],
        stacks={call.rank: [call.site]},
    )


def corrupted(rank: int, what: str, site: str) -> CorruptionError:
    """Report data whose bits changed between sender and receiver."""
    return CorruptionError(
        expected=f"the bits that rank {rank} sent as {what}",
        received="different bits",
        remedy=f"suspect the link or the memory of rank {rank}",
        ranks=[rank],
        stacks={rank: [site]},
    )
