"""Pending results: an operator, or a door of `host_reads.py`, that reads or writes a result before `wait()`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isobit.errors import PendingError
from isobit.simulator.call_sites import user_stack
from isobit.simulator.checkers.host_reads import DoorWatch
from isobit.simulator.memory import memory_of, overlap
from isobit.simulator.rank import Pending, Rank
from isobit.simulator.torch.backward_pass import lasting

# Namespaces of operators that wait by themselves.
WAITING = ("_c10d_functional", "c10d", "_c10d_functional_autograd")
DispatchMode: Any = TorchDispatchMode  # untyped in torch


class ReadWatch(DispatchMode):  # type: ignore[misc]
    """Look at the arguments of every operator while the rank has pending results. Views read nothing."""

    def __init__(self, rank: Rank) -> None:
        """Watch the operators of a rank."""
        super().__init__()
        self.rank, self.reported = rank, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the arguments, then call the operator."""
        if (
            self.rank.pending
            and not self.rank.communicating
            and func.namespace not in WAITING
            and not func.is_view
        ):
            leaves = tree_leaves((args, kwargs))
            self.check(str(func), [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))

    def check(self, func: str, tensors: list[Tensor]) -> None:
        """Report tensors that share memory with a pending result."""
        read = memory_of(tensors)
        for work in self.rank.pending.values():
            if overlap(read, work.memory):
                self._report(func, work)

    def _report(self, func: str, work: Pending) -> None:
        lines = user_stack(sys._getframe(2))
        line = lines[0] if lines else ""
        if line and line in self.reported:
            return
        self.reported.add(line)
        index = self.rank.index
        self.rank.findings.note(
            PendingError(
                expected=f"the result of {work.what} untouched until wait()",
                received=f"a read or write of it by {func} on rank {index}; the call was at {work.site}",
                remedy="call .wait() on the handle first",
                ranks=[index],
                stacks={index: lines},
            )
        )


@contextmanager
def watching_reads(rank: Rank) -> Iterator[None]:
    """Watch the operators and doors of the current thread, if the run watches reads."""
    if "reads" not in rank.watch:
        yield
        return
    watch = ReadWatch(rank)

    def on_host_read(what: str, tensor: Tensor) -> None:
        if rank.pending and not rank.communicating:
            watch.check(what, [tensor])

    rank.on_host_read = on_host_read
    with watch, lasting(DoorWatch(rank, watch.check)):
        yield
