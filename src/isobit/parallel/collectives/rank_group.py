"""A process group seen from this rank, and small exchanges of bytes and integers over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from isobit.errors import ArgumentError


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a process group; without torch.distributed, one rank alone."""

    ranks: tuple[int, ...]  # global ranks, in the group's order
    index: int  # of this rank in the group
    group: dist.ProcessGroup | None
    device: torch.device  # where the group's messages are

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> RankGroup:
        """Describe a process group; None is the default group.

        Raises:
            ArgumentError: This rank is not in the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls((0,), 0, None, torch.device("cpu"))
        if dist.get_rank(group) < 0:
            raise ArgumentError(
                expected="a group that this rank belongs to",
                received=f"rank {dist.get_rank()}, outside it",
                remedy="call this only on the ranks of the group",
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        return cls(ranks, dist.get_rank(group), group, device_of_messages(group))

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
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        gathered = mine.new_empty(len(data) * len(self.ranks))
        dist.all_gather_single(gathered, mine, group=self.group)
        joined = bytes(gathered.tolist())
        return [joined[at : at + len(data)] for at in range(0, len(joined), len(data))]

    def broadcast(self, data: bytes, size: int, source: int) -> bytes:
        """Return the `size` bytes of the group's rank `source`; only that rank's `data` is read."""
        if len(self.ranks) == 1 or not size:
            return data
        buffer = bytearray(data if self.index == source else size)
        message = torch.frombuffer(buffer, dtype=torch.uint8).to(self.device)
        dist.broadcast(message, group=self.group, group_src=source)
        return bytes(message.tolist())

    def add_integers(self, numbers: list[int]) -> list[int]:
        """Sum lists of int64 over the ranks; integer sums do not depend on the order."""
        if len(self.ranks) == 1:
            return numbers
        totals = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(totals, group=self.group)
        return totals.tolist()


def device_of_messages(group: dist.ProcessGroup | None) -> torch.device:
    """Return where small messages of a group are: on the CPU, if one of its backends takes CPU tensors.

    NCCL takes tensors on a GPU only. Its groups have the configuration "cuda:nccl", and with gloo
    beside it "cpu:gloo,cuda:nccl"; the name of the backend does not tell one from the other.
    """
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    if "cuda" in kinds:
        return torch.device("cuda", torch.cuda.current_device())
    raise ArgumentError(
        expected="a process group for tensors on the CPU or on CUDA devices",
        received=f"backends {dist.get_backend_config(group)}",
        remedy='use torch.distributed.init_process_group("cpu:gloo,cuda:nccl")',
    )


def is_first_rank() -> bool:
    """Return whether this is global rank 0, or torch.distributed is not in use."""
    return not dist.is_initialized() or dist.get_rank() == 0
