"""The process group of torch.distributed: each method makes one call on the simulated network."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from isobit.errors import UnsupportedError
from isobit.simulator.call_sites import torch_caller, user_line, user_stack
from isobit.simulator.collectives import Call, Group, Receive
from isobit.simulator.rank import current
from isobit.simulator.run import Run
from isobit.simulator.torch.work import (
    PendingWork,
    ReceiveWork,
    SendWork,
    begin,
    begin_receive,
    begin_send,
)

# Arguments of torch's process-group methods: option records, and tensors as lists of shares.

Options = Any  # torch's option records: one class per collective, with the same attributes


def is_asynchronous(options: Options) -> bool:
    """Return whether the caller waits later; callers in C++ (DDP, functional collectives) do."""
    return bool(getattr(options, "asyncOp", True))


def reduction(options: Options) -> Any:
    """Return the reduction of an option record, or a plain `ReduceOp` itself."""
    return getattr(options, "reduceOp", options) if options is not None else dist.ReduceOp.SUM


def root_of(options: Options) -> int:
    """Return the root of an option record, or a plain number itself."""
    root: Any = getattr(options, "rootRank", options)
    return int(root)


def as_list(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    """Return a list of tensors: some callers pass a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def slots(tensor: Tensor, count: int) -> list[Tensor]:
    """Cut a tensor into equal shares."""
    if not tensor.is_contiguous() or tensor.numel() % count:
        raise UnsupportedError(
            expected=f"a contiguous tensor of {count} equal shares",
            received=f"{tuple(tensor.shape)} with strides {tensor.stride()}",
            remedy="call .contiguous(), or use the list form for unequal shares",
        )
    return list(tensor.detach().view(-1).view(count, tensor.numel() // count).unbind())


def split(tensor: Tensor, sizes: Sequence[int] | None, count: int) -> list[Tensor]:
    """Cut a tensor into shares of the given numbers of rows, or into equal shares."""
    if not sizes:
        return slots(tensor, count)
    return list(torch.split_with_sizes(tensor.detach(), list(sizes)))


TorchProcessGroup: Any = dist.ProcessGroup  # its stubs describe other overloads

_served: list[Run] = []  # the run that new process groups belong to


class RankGroup(TorchProcessGroup):  # type: ignore[misc]
    """A process group as one of its members sees it."""

    def __init__(self, run: Run, group: Group, member: int) -> None:
        """Make the group of one member."""
        super().__init__(member, len(group.members))
        self.run, self.group, self.member, self.number = run, group, member, 0

    @override
    def getBackendName(self) -> str:
        return "isobit"

    @override
    def size(self) -> int:
        return len(self.group.members)

    @override
    def rank(self) -> int:
        return self.member

    @property
    @override
    def group_name(self) -> str:
        return self.group.name

    @property
    @override
    def pg_name(self) -> str:
        return self.group.name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def __repr__(self) -> str:
        """Return the name, rank and size."""
        return f"RankGroup({self.group.name!r}, rank {self.member} of {len(self.group.members)})"

    def shutdown(self) -> None:
        """Do nothing: the group has no resources."""

    abort = shutdown

    def _collect(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        options: Options,
        root: int = -1,
        op: Any = None,
        sources: list[Tensor] | None = None,
        targets: list[Tensor] | None = None,
    ) -> PendingWork:
        rank = current()
        self.number += 1
        caller = sys._getframe(1)
        stack = tuple(user_stack(caller))
        call = Call(
            rank.index,
            kind,
            list(inputs),
            list(outputs),
            root,
            op,
            asynchronous=is_asynchronous(options),
            site=stack[0] if stack else "",
            stack=stack,
            members=self.group.members,
            torchs_file=torch_caller(caller),
            sources=sources or [],
            targets=targets or [],
        )
        return begin(self.run, self.group, self.member, self.number, call)

    @override
    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> PendingWork:
        tensors = as_list(tensors)
        return self._collect("all_reduce", tensors, tensors, opts, op=reduction(opts))

    allreduce_coalesced = allreduce

    @override
    def reduce(self, tensors: list[Tensor], opts: Options = None) -> PendingWork:
        return self._collect("reduce", tensors, tensors, opts, root_of(opts), reduction(opts))

    @override
    def broadcast(self, tensors: list[Tensor], opts: Options = None) -> PendingWork:
        tensors = as_list(tensors)
        return self._collect("broadcast", tensors, tensors, opts, root_of(opts))

    @override
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        return self._collect("all_gather", inputs, [slot for row in outputs for slot in row], opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        """Gather several tensors; torch orders `outputs` by member, then by tensor."""
        rows = [slot for item in range(len(inputs)) for slot in (row[item] for row in outputs)]
        return self._collect("all_gather", inputs, rows, opts)

    @override
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        shares = [slot for output in outputs for slot in slots(output, self.size())]
        return self._collect(
            "all_gather",
            [t.detach().reshape(-1) for t in inputs],
            shares,
            opts,
            targets=list(outputs),
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @override
    def all_gather_single(
        self, output: Tensor, source: Tensor, opts: Options = None
    ) -> PendingWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    _allgather_base = all_gather_single

    @override
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> PendingWork:
        return self._collect(
            "reduce_scatter", [t for row in inputs for t in row], outputs, opts, op=reduction(opts)
        )

    @override
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        shares = [slot for tensor in inputs for slot in slots(tensor, self.size())]
        flat = [t.detach().view(-1) for t in outputs]
        return self._collect(
            "reduce_scatter",
            shares,
            flat,
            opts,
            op=reduction(opts),
            sources=list(inputs),
            targets=list(outputs),
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @override
    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: Options = None
    ) -> PendingWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    _reduce_scatter_base = reduce_scatter_single

    @override
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        return self._collect(
            "gather", inputs, [slot for row in outputs for slot in row], opts, root_of(opts)
        )

    @override
    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> PendingWork:
        return self._collect(
            "scatter", [t for row in inputs for t in row], outputs, opts, root_of(opts)
        )

    @override
    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> PendingWork:
        return self._collect("all_to_all", inputs, outputs, opts)

    @override
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
        return self._collect("all_to_all", *shares, opts, sources=[source], targets=[output])

    alltoall_base = all_to_all_single

    @override
    def barrier(self, opts: Options = None) -> PendingWork:
        return self._collect("barrier", [], [], opts)

    @override
    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> SendWork:
        site = user_line(sys._getframe(1))
        return begin_send(self.run, self.group, self.member, target, tag, tensors, site)

    @override
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ReceiveWork:
        return self._receive(tensors, source, tag)

    @override
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ReceiveWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], source: int | None, tag: int) -> ReceiveWork:
        site = user_line(sys._getframe(2))
        return begin_receive(self.run, Receive(self.group, self.member, source, tag, tensors, site))


def create(options: Any, _: Any = None) -> RankGroup:
    """Make a process group; torch calls this for the backend `isobit`."""
    rank = current()
    members = tuple(options.global_ranks_in_group) or tuple(range(rank.world_size))
    timeout = int((options.timeout or timedelta(minutes=30)) / timedelta(microseconds=1))
    name = str(options.group_id)
    group = Group(name, rank.incarnations[name], members, timeout)
    return RankGroup(_served[-1], group, options.group_rank)


@contextmanager
def serving(run: Run) -> Iterator[None]:
    """Register the backend with torch.distributed; process groups made in this context belong to the run."""
    if "isobit" not in dist.Backend.backend_list:
        dist.Backend.register_backend("isobit", create, extended_api=True, devices=["cpu"])
    _served.append(run)
    try:
        yield
    finally:
        _served.remove(run)
