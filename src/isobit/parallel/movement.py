"""Moves the pieces of an exchange between ranks: messages on gloo, collectives on every other transport."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES = 8 << 20  # of the whole tensor: its P rows then stay in a cache while they are added
PIECES_IN_FLIGHT = 2  # one is on the wire while one is added
# Below torch's grain of 32,768 elements an addition never starts threads of its own, so a worker has no second team.
COLUMNS_AT_ONCE = 32768
# Each exchange has tags of its own, so that those in flight together are never mixed up; far from what users take.
FIRST_TAG, TAGS = 1 << 24, 1 << 22
SECONDS_TO_END = 5


def add_rows(rows: Sequence[Tensor], total: Tensor, own: int) -> None:
    """The balanced tree over rows, by rank, into `total`; rows other than `own` are overwritten on the way."""
    for at in range(0, total.numel(), COLUMNS_AT_ONCE):
        level = [row[at : at + COLUMNS_AT_ONCE] for row in rows]
        kept = level[own]
        while len(level) > 2:
            level = [
                torch.add(left, right, out=right if left is kept else left)
                for left, right in zip(level[::2], level[1::2], strict=True)
            ]
        torch.add(level[0], level[1], out=total[at : at + COLUMNS_AT_ONCE])


class Line:
    """What one process keeps for one group: its place, the next tag, and a thread that finishes what runs on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # Each rank begins with its right neighbour, so that no rank is called by all at once.
        self.peers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self._group = weakref.ref(group)
        self._tags = itertools.count()
        self._slots: list[Tensor] = []
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group itself, which outlives every call on it."""
        group = self._group()
        assert group is not None
        return group

    def next_tag(self) -> int:
        """The same number on all ranks, since all call in the same order."""
        return FIRST_TAG + 2 * (next(self._tags) % TAGS)

    def take_slot(self, size: int, like: Tensor) -> Tensor:
        """Memory for what arrives: kept from call to call, since new pages cost as much as the bytes they take."""
        bytes_needed = size * like.element_size()
        slot = self._slots.pop() if self._slots else torch.empty(0, dtype=torch.uint8)
        if slot.numel() < bytes_needed:
            slot = torch.empty(bytes_needed, dtype=torch.uint8)
        return slot

    def give_slots(self, slots: Sequence[Tensor]) -> None:
        """Back for the next call: at most two pieces for each thread that exchanges."""
        self._slots += slots

    def has_messages(self, tensor: Tensor) -> bool:
        """Whether this is gloo itself: its collectives copy what its messages send from where it lies."""
        return (
            type(self.group) is dist.ProcessGroup
            and tensor.device.type == "cpu"
            and isinstance(self.group._get_backend(tensor.device), dist.ProcessGroupGloo)
        )

    def run(self, task: Callable[[], None]) -> None:
        """Runs a task after those before it, beside the caller; in the same order on all ranks."""
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            worker = threading.Thread(target=_serve, args=(self._tasks,), daemon=True, name="isobit exchange")
            worker.start()
            weakref.finalize(self, _end, self._tasks, worker)
        self._tasks.put(task)


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or the last exchange would live until the next


def _end(tasks: queue.SimpleQueue[Callable[[], None] | None], worker: threading.Thread) -> None:
    """A thread that is inside torch while the interpreter ends would abort the process; one that hangs is left."""
    tasks.put(None)
    if worker is not threading.current_thread():
        worker.join(SECONDS_TO_END)


_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, Line] = weakref.WeakKeyDictionary()


def line_of(group: dist.ProcessGroup) -> Line:
    """The line of a group, made at its first call."""
    known = _lines.get(group)
    return _lines.setdefault(group, Line(group)) if known is None else known


@dataclass(frozen=True)
class Piece:
    """A part of an exchange: what goes to each rank, and where this rank's sum goes."""

    shares: list[Tensor]
    total: Tensor


class Messages:
    """An exchange by messages: nothing is copied, and a piece is added while the next is on the wire."""

    def __init__(self, line: Line, pieces: Sequence[Piece], gather: bool) -> None:
        self.line, self.pieces, self.gather, self.tag = line, pieces, gather, line.next_tag()
        self.peers, self.runs_on = line.peers, True
        self.slots: list[Tensor] = []
        self.arriving: deque[list[dist.Work]] = deque()
        self.rest: list[dist.Work] = []

    def start(self) -> None:
        """Puts the first pieces on the wire, and offers the places of sums: none arrives before its share has left."""
        for index in range(min(PIECES_IN_FLIGHT, len(self.pieces))):
            first = self.pieces[0].total
            self.slots.append(self.line.take_slot(len(self.peers) * first.numel(), first))
            self._scatter(index)
        for piece in self.pieces if self.gather else ():
            places = [(peer, piece.shares[peer]) for peer in self.peers if piece.shares[peer].numel()]
            self.rest += [receive(self.line, place, peer, self.tag + 1) for peer, place in places]

    def finish(self) -> None:
        """Adds each piece as it comes, and hands its sum out."""
        for index, piece in enumerate(self.pieces):
            for work in self.arriving.popleft():
                work.wait()
            if piece.total.numel():
                rows = dict(zip(self.peers, self._rows(index), strict=True))
                rows[self.line.rank] = piece.shares[self.line.rank]
                add_rows([rows[rank] for rank in range(self.line.ranks)], piece.total, self.line.rank)
                if self.gather:
                    self.rest += [send(self.line, piece.total, peer, self.tag + 1) for peer in self.peers]
            if index + PIECES_IN_FLIGHT < len(self.pieces):
                self._scatter(index + PIECES_IN_FLIGHT)
        for work in self.rest:
            work.wait()
        self.line.give_slots(self.slots)

    def _rows(self, index: int) -> list[Tensor]:
        """Where the shares of a piece arrive, by peer; the slot was free once its last piece had been added."""
        total, slot = self.pieces[index].total, self.slots[index % PIECES_IN_FLIGHT]
        size = len(self.peers) * total.numel() * total.element_size()
        return list(slot[:size].view(total.dtype).view(len(self.peers), -1))

    def _scatter(self, index: int) -> None:
        piece = self.pieces[index]
        works: list[dist.Work] = []
        if piece.total.numel():
            rows = zip(self.peers, self._rows(index), strict=True)
            works = [receive(self.line, row, peer, self.tag) for peer, row in rows]
        shares = [(peer, piece.shares[peer]) for peer in self.peers if piece.shares[peer].numel()]
        self.rest += [send(self.line, share, peer, self.tag) for peer, share in shares]
        self.arriving.append(works)


class Gather:
    """Every rank's share to every rank."""

    def __init__(self, line: Line, share: Tensor, whole: Tensor) -> None:
        self.line, self.share, self.whole, self.runs_on = line, share, whole, line.has_messages(share)

    def start(self) -> None:
        """Puts all on the wire."""
        if not self.runs_on:
            work = dist.all_gather_into_tensor(self.whole, self.share, group=self.line.group, async_op=True)
            self.works = [_sure(work)]
            return
        tag, rows = self.line.next_tag(), self.whole.view(self.line.ranks, -1)
        peers = [peer for peer in self.line.peers if self.share.numel()]
        self.works = [receive(self.line, rows[peer], peer, tag) for peer in peers]
        self.works += [send(self.line, self.share, peer, tag) for peer in peers]
        if rows[self.line.rank].data_ptr() != self.share.data_ptr():
            rows[self.line.rank].copy_(self.share)

    def finish(self) -> None:
        """Waits for all."""
        for work in self.works:
            work.wait()


def send(line: Line, tensor: Tensor, peer: int, tag: int) -> dist.Work:
    """A message to a rank of the group; the tensor is read where it lies."""
    return line.group.send([tensor], peer, tag)


def receive(line: Line, tensor: Tensor, peer: int, tag: int) -> dist.Work:
    """A message from a rank of the group, written where it shall lie."""
    return line.group.recv([tensor], peer, tag)


def _sure(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None is for ranks outside the group
    return work


class Collectives:
    """An exchange by two collectives a piece, where a transport has no messages that are better."""

    def __init__(self, line: Line, pieces: Sequence[Tensor], total: Tensor | None) -> None:
        self.line, self.total = line, total
        self.pieces, self.runs_on = pieces, False
        self.pending: deque[tuple[Tensor, Tensor, dist.Work]] = deque()

    def start(self) -> None:
        """Launches the first pieces."""
        for piece in self.pieces[:PIECES_IN_FLIGHT]:
            self._scatter(piece)

    def finish(self) -> None:
        """Adds each piece as it comes, and gathers the sums; a padded piece is copied back."""
        gathers: list[tuple[dist.Work, Tensor, Tensor]] = []
        for index, piece in enumerate(self.pieces):
            sent, rows, work = self.pending.popleft()
            work.wait()
            own = sent.view(self.line.ranks, -1)[self.line.rank]
            total = own if self.total is None else self.total
            add_rows(list(rows.view(self.line.ranks, -1)), total, self.line.rank)
            if self.total is None:
                gather = dist.all_gather_into_tensor(sent, total, group=self.line.group, async_op=True)
                gathers.append((_sure(gather), piece, sent))
            if index + PIECES_IN_FLIGHT < len(self.pieces):
                self._scatter(self.pieces[index + PIECES_IN_FLIGHT])
        for gather, piece, sent in gathers:
            gather.wait()
            if sent is not piece:
                piece.copy_(sent[: piece.numel()])

    def _scatter(self, piece: Tensor) -> None:
        padding = -piece.numel() % self.line.ranks
        sent = torch.cat([piece, piece.new_zeros(padding)]) if padding else piece
        rows = torch.empty_like(sent)
        work = dist.all_to_all_single(rows, sent, group=self.line.group, async_op=True)
        self.pending.append((sent, rows, _sure(work)))
