"""`Levels`: a group of ranks as a hierarchy (rank, host, rack), with the bits of the flat group.

[Note: levels]
Ranks that are consecutive in the flat group form a subtree of [Note: the reduction tree over ranks]
(transfers.py) if their number is a power of two. So the sum inside each host, then across
the hosts of a rack, then across racks makes the additions of the flat tree. 16 ranks as a mesh of
shape (rack 2, host 2, rank 4), seen from rank 6:

    level | its group         | after it, rank 6 has the sum of ranks
    ------|-------------------|--------------------------------------
    rank  | 4, 5, 6, 7        | 4..7, of a quarter of the elements
    host  | 2, 6              | 0..7, of an eighth
    rack  | 6, 14             | 0..15, of a sixteenth

The sums return through the same groups, the racks first. A rank sends 2(P-1)/P of the data, as it
does in the flat group, and 2(4 + 2 + 2 - 3) messages instead of 2(16 - 1) with collectives.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import ArgumentError, CutError

AXES = {"rack": 0, "host": 1, "node": 1, "rank": 2}  # names whose order we know, outermost first
NAME_BYTES = 64  # of a host's name that ranks compare


class Levels:
    """Process groups of this rank, one per level of a hierarchy, for sums over all its ranks.

    Pass it as `group` to `Gradients`, `all_reduce`, `reduce_scatter`, `all_gather`,
    `get_total_norm`, `clip_grad_norm_` and `LossMeter.value`: the bits are those of the flat group.
    All ranks make it together.

    Args:
        mesh: A mesh whose last axis has the ranks of a host, the one before it the hosts of a
            rack, and so on; of any number of axes. Slice a mesh that has other axes as well, as in
            `mesh["host", "rank"]`.
        check_hosts: Whether to compare the names of hosts with the last axis.

    Raises:
        CutError: The axes are in another order, a size is no power of two, or the last axis has
            ranks of several hosts.
        ArgumentError: The mesh does not have all ranks of the default group.

    Example:
        Eight simulated ranks as two racks of two hosts of two ranks.

        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from isobit.parallel import Levels, all_reduce
        >>> from isobit.simulator import World
        >>> def add(rank):
        ...     mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("rack", "host", "rank"))
        ...     x = torch.tensor([1.0, 1e8, -1e8, 1.0] * 2)[rank]
        ...     all_reduce(x, Levels(mesh))
        ...     return x.item()
        >>> World(8).run(add).values[0]
        0.0
    """

    def __init__(self, mesh: DeviceMesh, *, check_hosts: bool = True) -> None:
        """Take the groups of the mesh's axes, and compare them over the ranks."""
        check_axes(mesh.mesh_dim_names or ())
        whole, world = mesh._get_root_mesh().size(), dist.get_world_size()
        if whole != world or mesh.get_coordinate() is None:
            raise ArgumentError(
                expected=f"a mesh of all {world} ranks, or a slice of one",
                received=f"a mesh of shape {tuple(mesh._get_root_mesh().shape)}, {whole} ranks",
                remedy="choose sizes whose product is the number of ranks; for some ranks only, "
                "pass their groups to Levels.from_groups",
            )
        self._take([mesh.get_group(axis) for axis in reversed(range(mesh.ndim))], check_hosts)

    @classmethod
    def from_groups(cls, *groups: dist.ProcessGroup | Levels, check_hosts: bool = True) -> Levels:
        """Make levels of process groups, the innermost first; one may be `Levels` itself.

        Args:
            groups: The ranks of this host, then the ranks that have the same place in the other
                hosts of the rack, and so on.
            check_hosts: Whether to compare the names of hosts with the innermost group.

        Raises:
            CutError: As the class itself.
            ArgumentError: There is no group, or this rank is not in one of them.
        """
        made = cls.__new__(cls)
        given = [part for g in groups for part in (g.groups if isinstance(g, Levels) else (g,))]
        if not given or not all(isinstance(group, dist.ProcessGroup) for group in given):
            raise ArgumentError(
                expected="process groups that this rank is part of, one per level",
                received=repr(groups),
                remedy="pass the groups of new_group, or make Levels from a DeviceMesh",
            )
        made._take(given, check_hosts)
        return made

    def _take(self, groups: Sequence[dist.ProcessGroup], check_hosts: bool) -> None:
        self.groups = tuple(groups)  # innermost first
        self.shape = tuple(dist.get_world_size(group) for group in self.groups)
        if any(size & (size - 1) for size in self.shape):
            raise CutError(
                expected="2^n ranks in every level, since ranks are the leaves of a balanced tree",
                received=f"levels of {self.shape} ranks, innermost first",
                remedy="form groups of powers of two",
            )
        self.rank = 0  # in the flat group
        for group, size in zip(reversed(self.groups), reversed(self.shape), strict=True):
            self.rank = self.rank * size + dist.get_rank(group)
        found = [(int.from_bytes(told[:8], "little"), told[8:]) for told in self._introduce()]
        self.ranks = tuple(rank for rank, _ in found)  # global ranks, in the flat group's order
        if list(self.ranks) != sorted(set(self.ranks)):
            raise CutError(
                expected="an inner group of consecutive ranks, and outer groups with one rank of "
                "each inner one",
                received=f"ranks in the order {list(self.ranks)[:16]}",
                remedy="take the groups from a DeviceMesh whose last axis has the ranks of a host",
            )
        if check_hosts:
            hosts = [name.rstrip(b"\0").decode(errors="replace") for _, name in found]
            check_same_hosts(hosts, self.shape[0])

    def _introduce(self) -> list[bytes]:
        """Return every rank's number and host, in the flat group's order."""
        name = host_name().encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        told = dist.get_rank().to_bytes(8, "little") + name
        return gather_bytes(told, self.groups, self.device)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def device(self) -> torch.device:
        """Where small messages are."""
        return device_of_messages(self.groups[0])

    def __repr__(self) -> str:
        """Return the sizes, outermost first."""
        return f"Levels({' × '.join(map(str, reversed(self.shape)))} ranks)"


Group = dist.ProcessGroup | Levels | None


def host_name() -> str:
    """Return the name of this host."""
    return socket.gethostname()


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


def gather_bytes(
    data: bytes, groups: Sequence[dist.ProcessGroup | None], device: torch.device
) -> list[bytes]:
    """Return every rank's bytes, which have one length, in the flat order of the groups' ranks."""
    joined = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    for group in groups:
        gathered = joined.new_empty(joined.numel() * dist.get_world_size(group))
        dist.all_gather_single(gathered, joined, group=group)
        joined = gathered
    whole = bytes(joined.tolist())
    return [whole[at : at + len(data)] for at in range(0, len(whole), len(data))]


def rank_in(group: Group) -> int:
    """Return this rank's number in a group or in levels; -1 outside."""
    return group.rank if isinstance(group, Levels) else dist.get_rank(group)


def rank_count(group: Group) -> int:
    """Return the number of ranks of a group or of levels."""
    return group.size if isinstance(group, Levels) else dist.get_world_size(group)


def ranks_of(group: Group) -> list[int]:
    """Return the global ranks of a group or of levels, in its order."""
    if isinstance(group, Levels):
        return list(group.ranks)
    return list(dist.get_process_group_ranks(group))


def check_axes(names: tuple[str, ...]) -> None:
    """Require that axes whose names are known are in their order.

    Raises:
        CutError: A rack is inside a host, or a host inside a rank.
    """
    known = [AXES[name] for name in names if name in AXES]
    if known != sorted(known):
        raise CutError(
            expected='axes from the outermost to the innermost, as ("rack", "host", "rank")',
            received=f"{names}",
            remedy="turn shape and names round: the last axis has the ranks of a host",
        )


def check_same_hosts(hosts: Sequence[str], inner: int) -> None:
    """Require equal hosts of consecutive ranks, and an innermost level inside one of them.

    Args:
        hosts: The host of each rank, in the flat group's order.
        inner: The size of the innermost level.

    Raises:
        CutError: The ranks are placed in another way.
    """
    runs = [(name, len(list(run))) for name, run in groupby(hosts)]
    counts = {name: hosts.count(name) for name in dict.fromkeys(hosts)}
    shown = ", ".join(f"{count} on {name}" for name, count in list(counts.items())[:8])
    if len(runs) != len(counts):
        raise CutError(
            expected="hosts of consecutive ranks",
            received=f"ranks that alternate between hosts ({shown})",
            remedy="number ranks host by host, as torchrun does; or pass check_hosts=False",
        )
    if len(set(counts.values())) > 1:
        raise CutError(
            expected="the same number of ranks on every host",
            received=f"unequal hosts: {shown}",
            remedy="start the same number on each (torchrun --nproc-per-node); or pass "
            "check_hosts=False",
        )
    if inner > runs[0][1]:
        raise CutError(
            expected=f"an innermost level inside one host, of at most {runs[0][1]} ranks",
            received=f"{inner} ranks of {inner // runs[0][1]} hosts ({shown})",
            remedy="exchange the axes: the last one has the ranks of a host; or pass "
            "check_hosts=False for hosts that one fast network joins",
        )


# A process group seen from this rank, and small exchanges of bytes and integers over it.


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
