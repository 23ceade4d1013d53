"""The process group that torch.distributed calls: each method becomes one call into the network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.simulator.collectives import Call
from isobit.simulator.network import Group, Receive
from isobit.simulator.rank import current, user_line
from isobit.simulator.torch.work import MessageWork, PendingWork, begin

TorchProcessGroup: Any = dist.ProcessGroup  # its stubs describe another set of overloads
Options = Any  # torch's option records, one class per collective, all read alike


def asynchronous(options: Options) -> bool:
    """C++ callers (DDP, functional collectives) give none, and wait later."""
    return bool(getattr(options, "asyncOp", True))


def reduction(options: Options) -> Any:
    """A plain `ReduceOp` is accepted as torch accepts it."""
    return getattr(options, "reduceOp", options) if options is not None else dist.ReduceOp.SUM


def root_of(options: Options) -> int:
    root: Any = getattr(options, "rootRank", options)
    return int(root)


def several(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    """Torch's shorthand forms take one tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def slots(tensor: Tensor, count: int) -> list[Tensor]:
    """A tensor's equal shares, in order."""
    if not tensor.is_contiguous() or tensor.numel() % count:
        raise UnsupportedError(
            expected=f"a contiguous tensor of {count} equal shares",
            received=f"{tuple(tensor.shape)} with strides {tensor.stride()}",
            remedy="call .contiguous(), or use the list form for unequal shares",
        )
    return list(tensor.detach().view(-1).view(count, tensor.numel() // count).unbind())


def split(tensor: Tensor, sizes: Sequence[int] | None, count: int) -> list[Tensor]:
    """A tensor's shares for an all-to-all: rows by the sizes given, or equal."""
    if not sizes:
        return slots(tensor, count)
    return list(torch.split_with_sizes(tensor.detach(), list(sizes)))


class RankGroup(TorchProcessGroup):  # type: ignore[misc]
    """One rank's end of a process group."""

    def __init__(self, group: Group, member: int) -> None:
        super().__init__(member, len(group.members))
        self.group, self.member, self.number = group, member, 0

    def getBackendName(self) -> str:
        return "isobit"

    def size(self) -> int:
        return len(self.group.members)

    def rank(self) -> int:
        return self.member

    @property
    def group_name(self) -> str:
        return self.group.name

    @property
    def pg_name(self) -> str:
        return self.group.name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def __repr__(self) -> str:
        return f"RankGroup({self.group.name!r}, rank {self.member} of {len(self.group.members)})"

    def shutdown(self) -> None:
        """Nothing is held outside the world."""

    def abort(self) -> None:
        """Nothing is held outside the world."""

    def _collect(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        options: Options,
        root: int = -1,
        op: Any = None,
        value: Any = None,
    ) -> PendingWork:
        rank = current()
        self.number += 1
        call = Call(
            rank.index,
            kind,
            list(inputs),
            list(outputs),
            root,
            op,
            asynchronous=asynchronous(options),
            site=user_line(sys._getframe(1)),
        )
        return begin(
            rank,
            self.group,
            self.member,
            self.number,
            call,
            list(outputs) if value is None else value,
        )

    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> PendingWork:
        tensors = several(tensors)
        return self._collect("all_reduce", tensors, tensors, opts, op=reduction(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Options = None) -> PendingWork:
        return self._collect("reduce", tensors, tensors, opts, root_of(opts), reduction(opts))

    def broadcast(self, tensors: list[Tensor], opts: Options = None) -> PendingWork:
        tensors = several(tensors)
        return self._collect("broadcast", tensors, tensors, opts, root_of(opts))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        return self._collect("all_gather", inputs, [slot for row in outputs for slot in row], opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        """Torch orders these lists by member, then by item."""
        rows = [slot for item in range(len(inputs)) for slot in (row[item] for row in outputs)]
        return self._collect("all_gather", inputs, rows, opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        shares = [slot for output in outputs for slot in slots(output, self.size())]
        return self._collect(
            "all_gather",
            [t.detach().reshape(-1) for t in inputs],
            shares,
            opts,
            value=list(outputs),
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(
        self, output: Tensor, source: Tensor, opts: Options = None
    ) -> PendingWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    _allgather_base = all_gather_single

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> PendingWork:
        return self._collect(
            "reduce_scatter", [t for row in inputs for t in row], outputs, opts, op=reduction(opts)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        shares = [slot for tensor in inputs for slot in slots(tensor, self.size())]
        flat = [t.detach().view(-1) for t in outputs]
        return self._collect(
            "reduce_scatter", shares, flat, opts, op=reduction(opts), value=list(outputs)
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: Options = None
    ) -> PendingWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    _reduce_scatter_base = reduce_scatter_single

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        return self._collect(
            "gather", inputs, [slot for row in outputs for slot in row], opts, root_of(opts)
        )

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> PendingWork:
        return self._collect(
            "scatter", [t for row in inputs for t in row], outputs, opts, root_of(opts)
        )

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        return self._collect("all_to_all", inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Options = None,
    ) -> PendingWork:
        count = self.size()
        shares = split(source, input_sizes, count), split(output, output_sizes, count)
        return self._collect("all_to_all", *shares, opts, value=[output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Options = None) -> PendingWork:
        return self._collect("barrier", [], [], opts)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> MessageWork:
        return MessageWork.sending(
            current(), self.group, self.member, target, tag, tensors, user_line(sys._getframe(1))
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MessageWork:
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MessageWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], source: int | None, tag: int) -> MessageWork:
        site = user_line(sys._getframe(2))
        return MessageWork.receiving(
            current(), Receive(self.group, self.member, source, tag, tensors, site)
        )


def create(options: Any, _: Any = None) -> RankGroup:
    """What torch calls for backend `isobit`."""
    rank = current()
    members = tuple(options.global_ranks_in_group) or tuple(range(rank.world.ranks))
    timeout = int((options.timeout or timedelta(minutes=30)) / timedelta(microseconds=1))
    name = str(options.group_id)
    return RankGroup(Group(name, rank.incarnations[name], members, timeout), options.group_rank)


def register() -> None:
    """Makes torch.distributed know the backend, once per process."""
    if "isobit" not in dist.Backend.backend_list:
        dist.Backend.register_backend("isobit", create, extended_api=True, devices=["cpu"])
