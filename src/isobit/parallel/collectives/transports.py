"""Carries an exchange out: by messages of two ranks on gloo, by collectives on every other transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.parallel.collectives.additions import add_rows, add_two
from isobit.parallel.collectives.group_state import Line
from isobit.parallel.collectives.recursive_halving import Meeting, Span, cut_spans, meet

MESSAGE_BYTES = (
    4 << 20
)  # each costs gloo a wake-up on both sides: 1 MB took a fifth more processor time
MESSAGES_AHEAD = 3  # arrive while one is added
LONG_BYTES = 1 << 20
PIECE_BYTES = 16 << 20  # of the whole tensor, where collectives move it
PIECES_AHEAD = 2


class Move(Protocol):
    """A part of an exchange: `start` puts its first bytes on the wire, `finish` returns when its result is in place."""

    runs_beside: bool

    def start(self) -> None: ...

    def finish(self) -> None: ...


class Meetings:
    """An all-reduce, or its first half, by messages: nothing is copied, and a message is added while others arrive."""

    runs_beside = True

    def __init__(
        self, line: Line, flat: Tensor, sums: Tensor, owned: tuple[Span, ...], gather: bool
    ) -> None:
        self.line, self.flat, self.sums, self.gather, self.tag = (
            line,
            flat,
            sums,
            gather,
            line.next_tag(),
        )
        self.meetings = meet(line.rank, owned)
        self.length = MESSAGE_BYTES // flat.element_size()
        self.sent: list[dist.Work] = []

    def start(self) -> None:
        """The first meeting is as any other."""

    def finish(self) -> None:
        """Meets the peers in order, then hands the sums back in the reverse order."""
        size = MESSAGES_AHEAD * self.length * self.flat.element_size()
        memory = self.line.take_memory(size)
        slots = list(memory[:size].view(self.flat.dtype).view(MESSAGES_AHEAD, -1))
        own = self.flat
        for meeting in self.meetings:
            self._swap(
                meeting, partial(self._send, own, meeting.given), partial(self._add, own, slots)
            )
            own = self.sums
        self.line.give_memory(memory)
        for meeting in reversed(self.meetings) if self.gather else ():
            self._swap(meeting, partial(self._send, own, meeting.kept), self._take_back)
        wait_for(self.sent)

    def _swap(
        self, meeting: Meeting, send: Callable[[int], None], receive: Callable[[Meeting], None]
    ) -> None:
        """Both ways at once; but within a host, where no link is idle, one after the other.

        Two long messages that pass each other on one socket of the loopback device stall, with many loss probes of
        TCP: 64 MB on 4 processes took twice gloo's time, against 1.2 to 1.4 of it. Why was not established.
        """
        longest = meeting.longest * self.flat.element_size()
        if longest < LONG_BYTES or not self.line.is_near(meeting.peer):
            send(meeting.peer)
            receive(meeting)
        elif meeting.is_left:
            send(meeting.peer)
            wait_for(self.sent)
            self.sent = []  # gloo's works may be waited for once
            receive(meeting)
        else:
            receive(meeting)
            send(meeting.peer)

    def _send(self, source: Tensor, spans: Sequence[Span], peer: int) -> None:
        parts = [source[span.start : span.stop] for span in cut_spans(spans, self.length)]
        self.sent += [self.line.send(part, peer, self.tag) for part in parts]

    def _take_back(self, meeting: Meeting) -> None:
        places = [
            self.sums[span.start : span.stop] for span in cut_spans(meeting.given, self.length)
        ]
        wait_for([self.line.receive(place, meeting.peer, self.tag) for place in places])

    def _add(self, own: Tensor, slots: Sequence[Tensor], meeting: Meeting) -> None:
        """What the peer sends, to what this rank holds; the lower rank's value on the left."""
        spans = deque(cut_spans(meeting.kept, self.length))
        coming: deque[tuple[Span, Tensor, dist.Work]] = deque()
        free = deque(slots)
        while spans or coming:
            while spans and free:
                span, slot = spans.popleft(), free.popleft()
                work = self.line.receive(slot[: span.stop - span.start], meeting.peer, self.tag)
                coming.append((span, slot, work))
            span, slot, work = coming.popleft()
            work.wait()
            mine, theirs = own[span.start : span.stop], slot[: span.stop - span.start]
            left, right = (mine, theirs) if meeting.is_left else (theirs, mine)
            add_two(left, right, self.sums[span.start : span.stop])
            free.append(slot)


class Doubling:
    """An all-gather by messages: what two neighbours hold, then what two pairs hold, …"""

    runs_beside = True

    def __init__(self, line: Line, share: Tensor, whole: Tensor) -> None:
        self.line, self.share, self.whole, self.tag = line, share, whole, line.next_tag()
        self.length = max(MESSAGE_BYTES // share.element_size(), 1)

    def start(self) -> None:
        """Puts the own share in its place."""
        own = self.whole.view(self.line.ranks, -1)[self.line.rank]
        if own.data_ptr() != self.share.data_ptr():
            own.copy_(self.share)

    def finish(self) -> None:
        """Twice as much at each step, and all of it lies together."""
        distance, width = 1, self.share.numel()
        while distance < self.line.ranks:
            peer = self.line.rank ^ distance
            mine, theirs = (
                self._parts(rank // distance * distance * width, distance * width)
                for rank in (self.line.rank, peer)
            )
            works = [self.line.receive(part, peer, self.tag) for part in theirs]
            works += [self.line.send(part, peer, self.tag) for part in mine]
            wait_for(works)
            distance *= 2

    def _parts(self, start: int, size: int) -> list[Tensor]:
        return [
            self.whole[s.start : s.stop]
            for s in cut_spans([Span(start, start + size)], self.length)
        ]


class Collectives:
    """An all-reduce, or its first half, by all-to-all, a local tree, and all-gather."""

    runs_beside = False

    def __init__(self, line: Line, flat: Tensor, total: Tensor | None) -> None:
        self.line, self.total = line, total
        # A reduce-scatter is one piece: its shares do not lie together.
        size = max(PIECE_BYTES // (flat.element_size() * line.ranks), 1) * line.ranks
        self.pieces = list(torch.split(flat, size)) if total is None else [flat]
        self.pending: deque[tuple[Tensor, Tensor, dist.Work]] = deque()

    def start(self) -> None:
        """Launches the first pieces."""
        for piece in self.pieces[:PIECES_AHEAD]:
            self._scatter(piece)

    def finish(self) -> None:
        """Adds each piece as it comes, and gathers the sums; a padded piece is copied back."""
        gathers: list[tuple[dist.Work, Tensor, Tensor]] = []
        for index, piece in enumerate(self.pieces):
            sent, rows, work = self.pending.popleft()
            work.wait()
            total = (
                sent.view(self.line.ranks, -1)[self.line.rank] if self.total is None else self.total
            )
            add_rows(list(rows.view(self.line.ranks, -1)), total)
            if self.total is None:
                gather = dist.all_gather_single(sent, total, group=self.line.group, async_op=True)
                gathers.append((_sure(gather), piece, sent))
            if index + PIECES_AHEAD < len(self.pieces):
                self._scatter(self.pieces[index + PIECES_AHEAD])
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


class Stock:
    """torch's own all-gather, which adds nothing."""

    runs_beside = False

    def __init__(self, line: Line, share: Tensor, whole: Tensor) -> None:
        self.line, self.share, self.whole = line, share, whole

    def start(self) -> None:
        """Launches it."""
        self.work = dist.all_gather_single(
            self.whole, self.share, group=self.line.group, async_op=True
        )

    def finish(self) -> None:
        """Waits for it."""
        _sure(self.work).wait()


class Chain:
    """Moves one after another, and what is to be done at the end."""

    def __init__(self, *moves: Move) -> None:
        self.moves, self.runs_beside = moves, all(move.runs_beside for move in moves)

    def start(self) -> None:
        """Begins the first."""
        for move in self.moves[:1]:
            move.start()

    def finish(self) -> None:
        """Ends each before the next begins."""
        for index, move in enumerate(self.moves):
            if index:
                move.start()
            move.finish()


def wait_for(works: Sequence[dist.Work]) -> None:
    """All of them."""
    for work in works:
        work.wait()


def _sure(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None is for ranks outside the group
    return work
