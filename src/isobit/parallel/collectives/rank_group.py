"""A process group seen from this rank, and small exchanges of bytes and integers over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from isobit.errors import ArgumentError
from isobit.parallel.collectives.levels import Group, Levels, device_of_messages, gather_bytes


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a process group; without torch.distributed, one rank alone."""

    ranks: tuple[int, ...]  # global ranks, in the group's order
    index: int  # of this rank in the group
    groups: Sequence[dist.ProcessGroup | None]  # one; or one per level, innermost first
    device: torch.device  # where the group's messages are

    @classmethod
    def of(cls, group: Group) -> RankGroup:
        """Describe a process group or `Levels`; None is the default group.

        Raises:
            ArgumentError: This rank is not in the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls((0,), 0, (None,), torch.device("cpu"))
        if isinstance(group, Levels):
            return cls(group.ranks, group.rank, group.groups, group.device)
        if dist.get_rank(group) < 0:
            raise ArgumentError(
                expected="a group that this rank belongs to",
                received=f"rank {dist.get_rank()}, outside it",
                remedy="call this only on the ranks of the group",
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        return cls(ranks, dist.get_rank(group), (group,), device_of_messages(group))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group.

        Raises:
            ArgumentError: There are several: the caller sends messages between any two ranks.
        """
        if len(self.groups) > 1:
            raise ArgumentError(
                expected="one process group",
                received=f"levels of {len(self.groups)} groups",
                remedy="pass the flat group of all ranks",
            )
        return self.groups[0]

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.ranks[self.index]

    @property
    def is_first(self) -> bool:
        """Whether this is the group's first rank, which counts what all ranks have."""
        return self.index == 0

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order; they must have one length."""
        if len(self.ranks) == 1 or not data:
            return [data] * len(self.ranks)
        return gather_bytes(data, self.groups, self.device)

    def broadcast(self, data: bytes, size: int, source: int) -> bytes:
        """Return the `size` bytes of the group's rank `source`; only that rank's `data` is read."""
        if len(self.ranks) == 1 or not size:
            return data
        buffer = bytearray(data if self.index == source else size)
        message = torch.frombuffer(buffer, dtype=torch.uint8).to(self.device)
        for group in self.groups:
            source, place = divmod(source, dist.get_world_size(group))
            dist.broadcast(message, group=group, group_src=place)
        return bytes(message.tolist())

    def add_integers(self, numbers: list[int]) -> list[int]:
        """Sum lists of int64 over the ranks; integer sums do not depend on the order."""
        if len(self.ranks) == 1:
            return numbers
        totals = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        for group in self.groups:
            dist.all_reduce(totals, group=group)
        return totals.tolist()


def is_first_rank() -> bool:
    """Return whether this is global rank 0, or torch.distributed is not in use."""
    return not dist.is_initialized() or dist.get_rank() == 0
