"""Names the line that reads a result before it was waited for: looks at every operator of a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from isobit.errors import PendingError
from isobit.simulator.rank import Rank, user_stack

if TYPE_CHECKING:
    from isobit.simulator.torch.work import RankWork

WAITS = (
    "_c10d_functional",
    "c10d",
    "_c10d_functional_autograd",
)  # operators that wait by themselves


Memory = Mapping[int, Sequence[tuple[int, int]]]  # runs of bytes, by storage


def memory_of(tensors: Iterable[Tensor]) -> Memory:
    """Where tensors lie: buckets of one flat buffer do not overlap. A wrapper's inner tensor comes by itself."""
    memory: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        if (
            is_traceable_wrapper_subclass(tensor)
            or tensor.layout is not torch.strided
            or not tensor.numel()
        ):
            continue
        first, width = int(tensor.storage_offset()), tensor.element_size()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = first * width
        runs = memory.setdefault(tensor.untyped_storage()._cdata, [])
        if runs and runs[-1][1] == start:  # slots of one buffer, in order
            start = runs.pop()[0]
        runs.append((start, (last + 1) * width))
    return memory


def overlap(left: Memory, right: Memory) -> bool:
    """Whether any byte is in both."""
    return any(
        a < d and c < b
        for at in left.keys() & right.keys()
        for a, b in left[at]
        for c, d in right[at]
    )


DispatchMode: Any = TorchDispatchMode  # which torch leaves untyped


class ReadWatch(DispatchMode):  # type: ignore[misc]
    """While a rank has work under way, no operator may take its output; a view reads nothing."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank, self.said = rank, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            self.rank.pending
            and not self.rank.communicating
            and func.namespace not in WAITS
            and not func.is_view
        ):
            self.look(
                func, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            )
        return func(*args, **(kwargs or {}))

    def look(self, func: Any, tensors: list[Tensor]) -> None:
        read = memory_of(tensors)
        for work in self.rank.pending.values():
            if overlap(read, work.memory):
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
