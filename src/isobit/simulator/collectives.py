"""What each collective computes, in rank order: the copies that it makes, as (destination, source) pairs.

Floats are added by a left fold over ranks, ((0 + 1) + 2) + …, in the tensor's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError

Copies = list[tuple[Tensor, Tensor]]
Signature = tuple[Any, ...]  # kind, root, op, dtypes, shapes


@dataclass
class Call:
    """One rank's part in a collective."""

    rank: int  # in the world
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    root: int = -1
    op: Any = None
    asynchronous: bool = False
    site: str = ""
    clock: int = 0
    marks: list[int | str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    sent: list[Tensor] | None = None  # what travels, where it is not the inputs themselves
    flipped_to: Any = None  # the fault that flips a bit on the last hop
    said: Signature | None = None

    @property
    def carried(self) -> list[Tensor]:
        return self.inputs if self.sent is None else self.sent

    def signature(self) -> Signature:
        """What every rank must say alike."""
        if self.said is None:
            measured = self.inputs or self.outputs
            if self.kind in (
                "all_gather",
                "reduce_scatter",
                "scatter",
            ):  # only a root has all of scatter's inputs
                measured = self.outputs
            # In an all-to-all each pair has a shape of its own.
            shapes = (
                None if self.kind == "all_to_all" else tuple([tensor.shape for tensor in measured])
            )
            op = None if self.op is None else name_of(self.op)
            self.said = (
                self.kind,
                self.root,
                op,
                tuple([tensor.dtype for tensor in measured]),
                shapes,
            )
        return self.said


def name_of(op: Any) -> str:
    return str(getattr(op, "op", op).name)


FOLDS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduce_tensors(op: Any, tensors: Sequence[Tensor]) -> Tensor:
    """A left fold in rank order, in a tensor of its own."""
    name = name_of(op)
    fold = FOLDS.get(name)
    if fold is None:
        raise ArgumentError(
            expected=f"a reduction out of {', '.join(FOLDS)}",
            received=name,
            remedy="use one that torch names",
        )
    if name == "PREMUL_SUM":
        factor = op.__getstate__()[1]
        tensors = [tensor * factor for tensor in tensors]
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        fold(total, tensor, out=total)
    if name == "AVG":
        exact = total.is_floating_point() or total.is_complex()
        total = total.div_(len(tensors), rounding_mode=None if exact else "trunc")
    return total


def all_reduce(calls: list[Call]) -> list[Copies]:
    totals = [
        reduce_tensors(calls[0].op, [call.carried[i] for call in calls])
        for i in range(len(calls[0].inputs))
    ]
    return [list(zip(call.outputs, totals, strict=True)) for call in calls]


def reduce(calls: list[Call]) -> list[Copies]:
    copies = all_reduce(calls)
    return [pairs if member == calls[0].root else [] for member, pairs in enumerate(copies)]


def broadcast(calls: list[Call]) -> list[Copies]:
    root = calls[calls[0].root]
    return [
        [] if call is root else list(zip(call.outputs, root.carried, strict=True)) for call in calls
    ]


def all_gather(calls: list[Call]) -> list[Copies]:
    """Outputs are the slots of all members, item after item."""
    return [
        [
            (call.outputs[item * len(calls) + member], other.carried[item])
            for item in range(len(calls[0].inputs))
            for member, other in enumerate(calls)
        ]
        for call in calls
    ]


def reduce_scatter(calls: list[Call]) -> list[Copies]:
    """Inputs are the slots for all members, item after item."""
    return [
        [
            (
                out,
                reduce_tensors(
                    call.op, [other.carried[item * len(calls) + member] for other in calls]
                ),
            )
            for item, out in enumerate(call.outputs)
        ]
        for member, call in enumerate(calls)
    ]


def gather(calls: list[Call]) -> list[Copies]:
    copies: list[Copies] = [[] for _ in calls]
    root = calls[0].root
    copies[root] = [
        (slot, call.carried[0]) for slot, call in zip(calls[root].outputs, calls, strict=True)
    ]
    return copies


def scatter(calls: list[Call]) -> list[Copies]:
    slots = calls[calls[0].root].carried
    return [[(call.outputs[0], slot)] for call, slot in zip(calls, slots, strict=True)]


def all_to_all(calls: list[Call]) -> list[Copies]:
    return [
        [(call.outputs[source], other.carried[member]) for source, other in enumerate(calls)]
        for member, call in enumerate(calls)
    ]


def barrier(calls: list[Call]) -> list[Copies]:
    return [[] for _ in calls]


PLANS: dict[str, Callable[[list[Call]], list[Copies]]] = {
    function.__name__: function
    for function in (
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        reduce_scatter,
        gather,
        scatter,
        all_to_all,
        barrier,
    )
}
FRESH = {
    "all_reduce",
    "reduce",
    "reduce_scatter",
}  # their sources are new tensors, which nobody else can change


def misfits(copies: list[Copies]) -> list[tuple[int, str]]:
    """Members whose buffers do not fit what they are sent."""
    return [
        (member, f"{tuple(source.shape)} {source.dtype} into {tuple(out.shape)} {out.dtype}")
        for member, pairs in enumerate(copies)
        for out, source in pairs
        if out.numel() != source.numel() or out.dtype != source.dtype
    ]
