"""Notices a rank that reads a result which it has not waited for: every operator's arguments are looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.errors import PendingError
from isobit.simulator.rank import Rank, user_line

if TYPE_CHECKING:
    from isobit.simulator.work import RankWork


def noticing(rank: Rank) -> AbstractContextManager[Any]:
    """For a rank's thread, if its world watches reads."""
    return Reads(rank) if "reads" in rank.world.watch_for else nullcontext()


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets every operator through; those that view memory without reading it are free to."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank, self.told = rank, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.rank.pending and not self.rank.unseen and func.namespace == "aten" and not func.is_view:
            self._look(str(func), (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _look(self, operator: str, arguments: Any) -> None:
        held = {memory_of(leaf) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)}
        for key, work in list(self.rank.pending.items()):
            if key not in self.told and any(memory_of(tensor) in held for tensor in results_of(work)):
                self.told.add(key)
                self.rank.world.findings.append(read_early(self.rank, work, operator))


def memory_of(tensor: Tensor) -> int:
    """Where its storage begins; 0 for a tensor that has none."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else 0


def results_of(work: RankWork) -> Iterator[Tensor]:
    """The buffers that the work will write on this rank."""
    call = getattr(work, "call", None)
    if call is None:  # a message: a sender may read what it sends
        yield from getattr(getattr(work, "waiting", None), "tensors", ())
    elif call.root < 0 or (call.root == work.member) == (call.kind != "broadcast"):
        yield from call.outputs


def read_early(rank: Rank, work: RankWork, operator: str) -> PendingError:
    return PendingError(
        expected=f"rank {rank.index} to wait for its {work.what} before it reads the result",
        received=f"{operator} on memory that the work still owns",
        remedy=f"call .wait() on what {work.site} returned",
        ranks=[rank.index],
        stacks={rank.index: [user_line(sys._getframe(1))]},
    )
