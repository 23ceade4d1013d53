"""Names the line that reads a result before it was waited for: looks at every operator of a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from isobit.errors import PendingError
from isobit.simulator.rank import Rank, user_stack

if TYPE_CHECKING:
    from isobit.simulator.work import RankWork

WAITS = ("_c10d_functional", "c10d", "_c10d_functional_autograd")  # operators that wait by themselves


def memory_of(tensors: list[Tensor]) -> frozenset[int]:
    """Storages by identity; a wrapper has none, and its inner tensor comes by itself."""
    return frozenset(t.untyped_storage()._cdata for t in tensors if not is_traceable_wrapper_subclass(t))


DispatchMode: Any = TorchDispatchMode  # which torch leaves untyped


class ReadWatch(DispatchMode):  # type: ignore[misc]
    """While a rank has work under way, no operator may take its output; a view reads nothing."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank, self.said = rank, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.rank.pending and not self.rank.communicating and func.namespace not in WAITS and not func.is_view:
            self.look(func, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))

    def look(self, func: Any, tensors: list[Tensor]) -> None:
        read = memory_of(tensors)
        for work in self.rank.pending.values():
            if read & work.memory:
                self.tell(func, work)

    def tell(self, func: Any, work: RankWork) -> None:
        lines = user_stack(sys._getframe(2))
        if lines and lines[0] in self.said:
            return
        self.said.add(lines[0] if lines else "")
        index = self.rank.index
        self.rank.world.findings.append(
            PendingError(
                expected=f"the result of {work.what} left alone until wait()",
                received=f"a read or write of it by {func} on rank {index}; the call was at {work.site}",
                remedy="call .wait() on the handle first",
                ranks=[index],
                stacks={index: lines},
            )
        )


@contextmanager
def watching_reads(rank: Rank) -> Iterator[None]:
    if "reads" not in rank.world.watch.chosen:
        yield
        return
    with ReadWatch(rank):
        yield
