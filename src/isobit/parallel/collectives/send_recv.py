"""Recursive halving and recursive doubling by point-to-point messages (send and recv), for gloo."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from isobit.parallel.collectives.communicator import Communicator
from isobit.parallel.collectives.elementwise_add import add_two
from isobit.parallel.collectives.recursive_halving import Round, Span, halving_rounds, split_spans
from isobit.parallel.collectives.transfer import wait_all

# Each message costs gloo a wake-up on both sides: with 1 MB, a fifth more processor time.
MESSAGE_BYTES = 8 << 20
MESSAGES_AHEAD = 3  # how many are received while one is added


class _Rounds:
    """What both directions share: this rank's rounds, and messages to the partner of a round."""

    runs_in_thread = True

    def __init__(self, comm: Communicator, sums: Tensor, owned: tuple[Span, ...]) -> None:
        """Take a tag and compute the rounds of this rank."""
        self.comm, self.sums, self.tag = comm, sums, comm.next_tag()
        self.rounds = halving_rounds(comm.rank, owned)
        self.length = MESSAGE_BYTES // sums.element_size()  # elements per message
        self.sent: list[dist.Work] = []

    def start(self) -> None:
        """Do nothing: the first round is like all others."""

    def _send(self, source: Tensor, spans: Sequence[Span], peer: int) -> None:
        for span in split_spans(spans, self.length):
            self.sent.append(self.comm.send(source[span.start : span.stop], peer, self.tag))


class RecursiveHalvingReduce(_Rounds):
    """Reduce-scatter by recursive halving; `RecursiveDoublingReturn` makes it an all-reduce.

    Messages are sent from the tensor itself, and one message is added while the next ones arrive.

    Args:
        comm: The communicator of the group.
        flat: This rank's addends. # [numel]
        sums: Where the sums are written; may be `flat`. # [numel]
        owned: By rank, the span whose sum that rank has in the end.
    """

    def __init__(
        self, comm: Communicator, flat: Tensor, sums: Tensor, owned: tuple[Span, ...]
    ) -> None:
        """Take a tag and compute the rounds of this rank."""
        super().__init__(comm, sums, owned)
        self.flat = flat

    def finish(self) -> None:
        """Run the rounds, nearest partner first."""
        kept = [span.length for step in self.rounds for span in step.kept]
        size = MESSAGES_AHEAD * min(self.length, max(kept, default=1)) * self.flat.element_size()
        buffer = self.comm.borrow_buffer(size)
        slots = list(buffer[:size].view(self.flat.dtype).view(MESSAGES_AHEAD, -1))
        own = self.flat
        for step in self.rounds:
            self._send(own, step.sent, step.peer)
            self._receive_and_add(own, slots, step)
            own = self.sums
        self.comm.return_buffer(buffer)
        wait_all(self.sent)

    def _receive_and_add(self, own: Tensor, slots: Sequence[Tensor], step: Round) -> None:
        """Add what the peer sends to what this rank has; the lower rank's value is on the left."""
        spans = deque(split_spans(step.kept, self.length))
        arriving: deque[tuple[Span, Tensor, dist.Work]] = deque()
        free = deque(slots)
        while spans or arriving:
            while spans and free:
                span, slot = spans.popleft(), free.popleft()
                work = self.comm.receive(slot[: span.length], step.peer, self.tag)
                arriving.append((span, slot, work))
            span, slot, work = arriving.popleft()
            work.wait()
            mine, theirs = own[span.start : span.stop], slot[: span.length]
            left, right = (mine, theirs) if step.is_left else (theirs, mine)
            add_two(left, right, self.sums[span.start : span.stop])
            free.append(slot)


class RecursiveDoublingReturn(_Rounds):
    """Send sums back through the rounds of `RecursiveHalvingReduce` in reverse order."""

    def finish(self) -> None:
        """Run the rounds, farthest partner first."""
        for step in reversed(self.rounds):
            self._send(self.sums, step.kept, step.peer)
            self._receive_sums(step)
        wait_all(self.sent)

    def _receive_sums(self, step: Round) -> None:
        targets = [self.sums[s.start : s.stop] for s in split_spans(step.sent, self.length)]
        wait_all([self.comm.receive(target, step.peer, self.tag) for target in targets])


class RecursiveDoublingGather:
    """All-gather by recursive doubling: a rank exchanges all it has with r^1, then r^2, r^4, ...

    Args:
        comm: The communicator of the group, whose size is a power of two.
        share: This rank's tensor. # [numel]
        whole: Where all ranks' tensors are written. # [ranks * numel]
    """

    runs_in_thread = True

    def __init__(self, comm: Communicator, share: Tensor, whole: Tensor) -> None:
        """Take a tag."""
        self.comm, self.share, self.whole, self.tag = comm, share, whole, comm.next_tag()
        self.length = max(MESSAGE_BYTES // share.element_size(), 1)

    def start(self) -> None:
        """Copy this rank's share to its place in the whole."""
        own = self.whole.view(self.comm.ranks, -1)[self.comm.rank]
        if own.data_ptr() != self.share.data_ptr():
            own.copy_(self.share)

    def finish(self) -> None:
        """Exchange runs that double in length each round and stay contiguous."""
        distance, width = 1, self.share.numel()
        while distance < self.comm.ranks:
            peer = self.comm.rank ^ distance
            mine, theirs = (
                self._messages(rank // distance * distance * width, distance * width)
                for rank in (self.comm.rank, peer)
            )
            works = [self.comm.receive(part, peer, self.tag) for part in theirs]
            works += [self.comm.send(part, peer, self.tag) for part in mine]
            wait_all(works)
            distance *= 2

    def _messages(self, start: int, size: int) -> list[Tensor]:
        spans = split_spans([Span(start, start + size)], self.length)
        return [self.whole[span.start : span.stop] for span in spans]
