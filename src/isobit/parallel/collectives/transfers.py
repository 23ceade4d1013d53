"""Transfers of partial sums between ranks: by messages for gloo, by all-to-all for other backends, and over levels.

[Note: the reduction tree over ranks]
The sum over P ranks (P a power of two) is the balanced binary tree whose leaf r is rank r:
((0+1)+(2+3))+((4+5)+(6+7)) for P = 8. Recursive halving evaluates that tree in log2 P rounds. In
round i, rank r exchanges with its partner r XOR 2^i: each rank sends the half of its current
elements that the partner keeps, and adds what it receives. The lower rank's value is always the
left operand. After round i a rank has sums over 2^(i+1) consecutive ranks: over one subtree.

The usual form of recursive halving begins with the farthest partner; ours begins with the nearest,
because only then do the partial sums follow the tree above. 8 ranks, 8 elements e0..e7:

    rank | round 1: partner r^1 | round 2: partner r^2 | round 3: partner r^4 | owns the sum of
    -----|----------------------|----------------------|----------------------|----------------
      0  | 1, keeps e0..e3      | 2, keeps e0 e1       | 4, keeps e0          | e0
      1  | 0, keeps e4..e7      | 3, keeps e4 e5       | 5, keeps e4          | e4
      2  | 3, keeps e0..e3      | 0, keeps e2 e3       | 6, keeps e2          | e2
      3  | 2, keeps e4..e7      | 1, keeps e6 e7       | 7, keeps e6          | e6
      4  | 5, keeps e0..e3      | 6, keeps e0 e1       | 0, keeps e1          | e1
      5  | 4, keeps e4..e7      | 7, keeps e4 e5       | 1, keeps e5          | e5
      6  | 7, keeps e0..e3      | 4, keeps e2 e3       | 2, keeps e3          | e3
      7  | 6, keeps e4..e7      | 5, keeps e6 e7       | 3, keeps e7          | e7
    sums |  0+1, 2+3, 4+5, 6+7  |  (0+1)+(2+3), ...    |  the whole tree      |

The owners are bit-reversed (rank 1 = 001 owns e4 = 100), so that what a rank keeps or sends in a
round is one contiguous run. Each rank sends (P-1)/P of the data. An all-reduce then sends the sums
back through the same rounds in reverse order (recursive doubling).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.parallel.collectives.communicator import Communicator
from isobit.parallel.collectives.elementwise_add import add_rows, add_two, round_into

# The interface of a data transfer between ranks, and the transfers that stay on one rank.


class Transfer(Protocol):
    """One stage of a collective."""

    runs_in_thread: bool  # whether the communicator's thread may run it while the caller computes

    def start(self) -> None:
        """Launch the first messages."""

    def finish(self) -> None:
        """Return when the result is in place."""


class LocalCopy:
    """Copy from one tensor to another on this rank."""

    runs_in_thread = True

    def __init__(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` to `target`, of one shape."""
        self.source, self.target = source, target

    def start(self) -> None:
        """Do nothing: a copy is done in `finish`."""

    def finish(self) -> None:
        """Copy."""
        self.target.copy_(self.source)


class LocalRound:
    """Round this rank's sums once, so that the rounded ones are sent."""

    runs_in_thread = True

    def __init__(self, sums: Tensor, rounded: Tensor) -> None:
        """Round `sums` into `rounded`, of one shape and a narrower dtype."""
        self.sums, self.rounded = sums, rounded

    def start(self) -> None:
        """Do nothing: rounding is done in `finish`."""

    def finish(self) -> None:
        """Round."""
        round_into(self.sums, self.rounded)


class Sequential:
    """Run transfers one after another."""

    def __init__(self, *transfers: Transfer) -> None:
        """Run these transfers in this order; without any, do nothing."""
        self.transfers: list[Transfer] = []
        for transfer in transfers:
            self.transfers += transfer.transfers if isinstance(transfer, Sequential) else [transfer]
        # What does nothing needs no thread, and the simulator would not see one.
        self.runs_in_thread = bool(self.transfers) and all(t.runs_in_thread for t in self.transfers)

    def start(self) -> None:
        """Start the first transfer."""
        for transfer in self.transfers[:1]:
            transfer.start()

    def finish(self) -> None:
        """Finish each transfer before the next one starts."""
        for index, transfer in enumerate(self.transfers):
            if index:
                transfer.start()
            transfer.finish()


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for every work, in order."""
    for work in works:
        work.wait()


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of the reduced tensor."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Round:
    """One exchange with another rank: this rank keeps the spans `kept` and sends `sent`."""

    peer: int
    is_left: bool  # this rank is the lower one, so its value is the left operand
    kept: tuple[Span, ...]
    sent: tuple[Span, ...]


@lru_cache(maxsize=1024)
def halving_rounds(rank: int, owned: tuple[Span, ...]) -> list[Round]:
    """Return the rounds of a rank, nearest partner first: [Note: the reduction tree over ranks].

    Args:
        rank: The rank in the group.
        owned: By rank, the span whose sum that rank has in the end; its length is a power of two.

    Example:
        >>> for step in halving_rounds(1, bit_reversed_spans(8, 8)):
        ...     print(step.peer, step.kept)
        0 (Span(start=4, stop=8),)
        3 (Span(start=4, stop=6),)
        5 (Span(start=4, stop=5),)
    """
    rounds = []
    distance = 1
    while distance < len(owned):
        # This rank still has the elements of the ranks that agree with it in the lower bits.
        below = range(rank % distance, len(owned), distance)
        kept = [owned[other] for other in below if other & distance == rank & distance]
        sent = [owned[other] for other in below if other & distance != rank & distance]
        rounds.append(Round(rank ^ distance, not rank & distance, _joined(kept), _joined(sent)))
        distance *= 2
    return rounds


@lru_cache(maxsize=1024)
def equal_spans(elements: int, ranks: int) -> tuple[Span, ...]:
    """Return the owners of a reduce-scatter: rank r has the r-th of `ranks` equal shares."""
    edges = [elements * rank // ranks for rank in range(ranks + 1)]
    return tuple(Span(edges[rank], edges[rank + 1]) for rank in range(ranks))


@lru_cache(maxsize=1024)
def bit_reversed_spans(elements: int, ranks: int) -> tuple[Span, ...]:
    """Return the owners of an all-reduce: each round keeps and sends one contiguous run."""
    spans, bits = equal_spans(elements, ranks), ranks.bit_length() - 1
    return tuple(spans[int(format(rank, f"0{bits}b")[::-1], 2)] for rank in range(ranks))


def split_spans(spans: Sequence[Span], length: int) -> list[Span]:
    """Split spans into runs of at most `length` elements, alike on both ranks of a round."""
    return [
        Span(at, min(at + length, span.stop))
        for span in spans
        for at in range(span.start, span.stop, length)
    ]


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in sorted((s for s in spans if s.start < s.stop), key=lambda s: s.start):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


# Recursive halving and recursive doubling by point-to-point messages (send and recv), for gloo.

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


# The same sums by torch.distributed's own collectives, for every backend other than gloo.
#
# An all-to-all brings each rank all addends of its elements; the rank adds them along the tree; an
# all-gather distributes the sums. The backend moves bytes and adds nothing.

CHUNK_BYTES = 16 << 20  # of the whole tensor: bounds the memory for what arrives
CHUNKS_AHEAD = 2


class AllToAllReduce:
    """All-reduce in place, or reduce-scatter where `total` is given.

    Args:
        comm: The communicator of the group.
        flat: This rank's addends. # [numel]
        total: Receives this rank's sums of a reduce-scatter, else None. # [numel/ranks]
    """

    runs_in_thread = False

    def __init__(self, comm: Communicator, flat: Tensor, total: Tensor | None) -> None:
        """Divide the addends into chunks."""
        self.comm, self.total = comm, total
        # A reduce-scatter is one chunk: in more, the elements of a rank would not be contiguous.
        size = max(CHUNK_BYTES // (flat.element_size() * comm.ranks), 1) * comm.ranks
        self.chunks = list(torch.split(flat, size)) if total is None else [flat]
        self.pending: deque[tuple[Tensor, Tensor, dist.Work]] = deque()

    def start(self) -> None:
        """Launch the first all-to-alls."""
        for chunk in self.chunks[:CHUNKS_AHEAD]:
            self._scatter(chunk)

    def finish(self) -> None:
        """Add each chunk as it arrives and gather the sums; a padded chunk is copied back."""
        gathers: list[tuple[dist.Work, Tensor, Tensor]] = []
        for index, chunk in enumerate(self.chunks):
            sent, rows, work = self.pending.popleft()
            work.wait()
            own = sent.view(self.comm.ranks, -1)[self.comm.rank]
            total = own if self.total is None else self.total
            add_rows(list(rows.view(self.comm.ranks, -1)), total)
            if self.total is None:
                gather = dist.all_gather_single(sent, total, group=self.comm.group, async_op=True)
                gathers.append((_required(gather), chunk, sent))
            if index + CHUNKS_AHEAD < len(self.chunks):
                self._scatter(self.chunks[index + CHUNKS_AHEAD])
        for gather, chunk, sent in gathers:
            gather.wait()
            if sent is not chunk:
                chunk.copy_(sent[: chunk.numel()])

    def _scatter(self, chunk: Tensor) -> None:
        padding = -chunk.numel() % self.comm.ranks
        sent = torch.cat([chunk, chunk.new_zeros(padding)]) if padding else chunk
        rows = torch.empty_like(sent)
        work = dist.all_to_all_single(rows, sent, group=self.comm.group, async_op=True)
        self.pending.append((sent, rows, _required(work)))


class TorchAllGather:
    """All-gather by torch.distributed, which adds nothing."""

    runs_in_thread = False

    def __init__(self, comm: Communicator, share: Tensor, whole: Tensor) -> None:
        """Gather `share` [numel] of every rank into `whole` [ranks * numel]."""
        self.comm, self.share, self.whole = comm, share, whole

    def start(self) -> None:
        """Launch the all-gather."""
        self.work = dist.all_gather_single(
            self.whole, self.share, group=self.comm.group, async_op=True
        )

    def finish(self) -> None:
        """Wait for the all-gather."""
        _required(self.work).wait()


def _required(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch returns None on ranks outside the group
    return work


# The transfers of a sum or an all-gather over communicators, one per level: [Note: levels].
#
# A flat group is one level. Each function takes the communicators innermost first.


def reduce_over(
    comms: Sequence[Communicator], flat: Tensor, rounded: Tensor | None = None
) -> Transfer:
    """All-reduce: scatter inside, all-reduce across, gather inside.

    [Note: rounding before the return]
    Partial sums are fp32, and rounding one of them would change the sum. A complete sum is rounded
    once, by whoever has it, with the same bits. So its owner rounds it, and 16-bit parameters need
    half the bytes on the way back: 3/4 of an fp32 all-reduce, 3/2 of one that adds in 16 bits.

    Args:
        comms: One communicator per level, innermost first.
        flat: This rank's addends; receives the sums if `rounded` is None, else overwritten.
        rounded: Receives the sums in its own, narrower dtype. # [numel]
    """
    levels = [comm for comm in comms if comm.ranks > 1]
    if not flat.numel():
        return Sequential()
    if not levels:
        return Sequential() if rounded is None else LocalRound(flat, rounded)
    inner, outer = levels[0], levels[1:]
    if inner.uses_send_recv(flat):
        owned = bit_reversed_spans(flat.numel(), inner.ranks)
        mine = slice(owned[inner.rank].start, owned[inner.rank].stop)
        across = reduce_over(outer, flat[mine], None if rounded is None else rounded[mine])
        returned = RecursiveDoublingReturn(inner, flat if rounded is None else rounded, owned)
        return Sequential(RecursiveHalvingReduce(inner, flat, flat, owned), across, returned)
    if not outer and rounded is None:
        return AllToAllReduce(inner, flat, None)
    return _reduce_shares(levels, flat, rounded)


def _reduce_shares(
    levels: Sequence[Communicator], flat: Tensor, rounded: Tensor | None
) -> Transfer:
    """All-reduce by collectives in shares of one size."""
    inner, outer = levels[0], levels[1:]
    padding = -flat.numel() % math.prod(comm.ranks for comm in levels)
    whole = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    target = flat if rounded is None else rounded
    share = whole.new_empty(whole.numel() // inner.ranks)
    sent = share if rounded is None else rounded.new_empty(share.numel())
    gathered = target.new_empty(whole.numel()) if padding else target
    stages = [
        AllToAllReduce(inner, whole, share),
        reduce_over(outer, share, None if rounded is None else sent),
        TorchAllGather(inner, sent, gathered),
    ]
    return Sequential(*stages, *([LocalCopy(gathered[: flat.numel()], target)] if padding else []))


def scatter_over(comms: Sequence[Communicator], flat: Tensor, total: Tensor) -> Transfer:
    """Reduce-scatter: the r-th share of the sum to rank r of the flat group.

    An inner rank needs the shares of its place on all hosts, which are not contiguous. So the input
    is copied once, from [outermost, …, innermost, share] to [innermost, …, outermost, share].
    """
    levels = [comm for comm in comms if comm.ranks > 1]
    if not levels or not flat.numel():
        return LocalCopy(flat, total)
    if len(levels) > 1:
        flat = _turned(flat, [comm.ranks for comm in reversed(levels)])
    stages: list[Transfer] = []
    for at, comm in enumerate(levels):
        part = total if at + 1 == len(levels) else flat.new_empty(flat.numel() // comm.ranks)
        stages += _scatter(comm, flat, part)
        flat = part
    return Sequential(*stages)


def _scatter(comm: Communicator, flat: Tensor, total: Tensor) -> list[Transfer]:
    if not comm.uses_send_recv(flat):
        return [AllToAllReduce(comm, flat, total)]
    sums, owned = torch.empty_like(flat), equal_spans(flat.numel(), comm.ranks)
    mine = sums[owned[comm.rank].start : owned[comm.rank].stop]
    return [RecursiveHalvingReduce(comm, flat, sums, owned), LocalCopy(mine, total)]


def gather_over(comms: Sequence[Communicator], share: Tensor, whole: Tensor) -> Transfer:
    """All-gather in the flat group's order, the outermost level first: it has the shortest runs."""
    levels = [comm for comm in comms if comm.ranks > 1]
    if not levels or not share.numel():
        return LocalCopy(share, whole)
    if len(levels) == 1:
        return _gather(levels[0], share, whole)
    stages: list[Transfer] = []
    for comm in reversed(levels):
        gathered = share.new_empty(share.numel() * comm.ranks)
        stages.append(_gather(comm, share, gathered))
        share = gathered
    sizes = [comm.ranks for comm in levels]
    back = share.view(*sizes, -1).permute(*reversed(range(len(sizes))), len(sizes))
    return Sequential(*stages, LocalCopy(back, whole.view(back.shape)))


def _gather(comm: Communicator, share: Tensor, whole: Tensor) -> Transfer:
    doubles = comm.uses_send_recv(share) and not comm.ranks & (comm.ranks - 1)
    return (RecursiveDoublingGather if doubles else TorchAllGather)(comm, share, whole)


def _turned(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a copy with the axes `sizes` of a flat tensor in the reverse order."""
    axes = [*reversed(range(len(sizes))), len(sizes)]
    return flat.view(*sizes, -1).permute(axes).contiguous().view(-1)
