"""The same sums by torch.distributed's own collectives, for every backend other than gloo.

An all-to-all brings each rank all addends of its elements; the rank adds them along the tree; an
all-gather distributes the sums. The backend moves bytes and adds nothing.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.parallel.collectives.communicator import Communicator
from isobit.parallel.collectives.elementwise_add import add_rows

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
