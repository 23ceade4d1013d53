"""The ranks of a process group, this rank's place among them, and the device that their messages stand on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from isobit.errors import ArgumentError


@dataclass(frozen=True)
class Members:
    """Global ranks in the group's order; without torch.distributed, one rank alone."""

    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    device: torch.device

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Members:
        """Of a group; None is the world."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls((0,), 0, None, torch.device("cpu"))
        if dist.get_rank(group) < 0:
            raise ArgumentError(
                expected="a group that this rank belongs to",
                received=f"rank {dist.get_rank()}, outside it",
                remedy="call this on the ranks of the group alone",
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        on_gpu = dist.get_backend(group) == "nccl"
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        return cls(ranks, dist.get_rank(group), group, device)

    @property
    def rank(self) -> int:
        """This rank, in the world."""
        return self.ranks[self.index]

    @property
    def is_first(self) -> bool:
        """Whether it counts what all of them hold."""
        return self.index == 0

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everyone's, in the order of ranks; as long on each."""
        if len(self.ranks) == 1 or not data:
            return [data] * len(self.ranks)
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        all_of_them = mine.new_empty(len(data) * len(self.ranks))
        dist.all_gather_single(all_of_them, mine, group=self.group)
        joined = bytes(all_of_them.tolist())
        return [joined[at : at + len(data)] for at in range(0, len(joined), len(data))]

    def broadcast(self, data: bytes, size: int, source: int) -> bytes:
        """The data of the member `source`, whose size all know."""
        if len(self.ranks) == 1 or not size:
            return data
        held = bytearray(data if self.index == source else size)
        message = torch.frombuffer(held, dtype=torch.uint8).to(self.device)
        dist.broadcast(message, group=self.group, group_src=source)
        return bytes(message.tolist())

    def add_integers(self, numbers: list[int]) -> list[int]:
        """Sums over the ranks: integers, so in any order."""
        if len(self.ranks) == 1:
            return numbers
        held = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(held, group=self.group)
        return held.tolist()


def is_first_rank() -> bool:
    """Of the world; also where there is no other."""
    return not dist.is_initialized() or dist.get_rank() == 0
