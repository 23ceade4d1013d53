"""How a global batch is spread: data-parallel ranks × micro-batches × tensor-parallel ranks, and the engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from isobit.errors import ArgumentError, CutError
from isobit.gates.training.workload import Workload
from isobit.order.plan import FeaturePlan
from isobit.parallel.data.global_batch import GlobalBatch

ENGINES = ("isobit", "ddp", "fsdp2")
MOST_RANKS = 32
WRAPPED = (
    (2, 1),
    (2, 4),
    (4, 2),
    (8, 1),
)  # (data, micro) of DDP and FSDP2, which stand beside the grid


@dataclass(frozen=True, order=True)
class Layout:
    """`data` × `tensor` ranks, each with `micro` micro-batches a step."""

    data: int = 1
    micro: int = 1
    tensor: int = 1
    engine: str = "isobit"

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ArgumentError(
                expected=f"one of {', '.join(ENGINES)}",
                received=repr(self.engine),
                remedy="name an engine",
            )
        if self.engine != "isobit" and (self.tensor > 1 or self.data == 1):
            raise CutError(
                expected=f"{self.engine} over two data-parallel ranks or more, without tensor parallelism",
                received=str(self),
                remedy="use the engine 'isobit' for tensor parallelism, and for one rank",
            )

    @property
    def ranks(self) -> int:
        """How many in all."""
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"{self.engine} {self.data}×{self.micro}×{self.tensor}"


def grid(workload: Workload, data: int = 8, micro: int = 8, tensor: int = 4) -> list[Layout]:
    """Every power of two up to these that the samples, the model and 32 ranks allow; then DDP and FSDP2."""
    powers = [[1 << i for i in range(most.bit_length())] for most in (data, micro, tensor)]
    found = [
        Layout(d, m, t)
        for d, m, t in itertools.product(*powers)
        if d * m <= workload.samples and d * t <= MOST_RANKS and t <= widest_tensor(workload)
    ]
    wrapped = [(d, m) for d, m in WRAPPED if d <= data and m <= micro and d * m <= workload.samples]
    return found + [Layout(d, m, 1, engine) for engine in ENGINES[1:] for d, m in wrapped]


def refuse_uncut(layout: Layout, workload: Workload) -> None:
    """A layout that the samples or the model cannot be cut for, before anything is trained."""
    GlobalBatch(workload.samples, layout.data, layout.micro)
    widest = widest_tensor(workload)
    if layout.tensor not in [1 << i for i in range(widest.bit_length())]:
        raise CutError(
            expected=f"a power of two of tensor-parallel ranks, at most {widest}",
            received=str(layout),
            remedy="choose fewer, or a wider workload",
        )


def widest_tensor(workload: Workload) -> int:
    """The most tensor-parallel ranks that every cut axis of the model allows."""
    wide = workload.heads * workload.head_dim
    joined = wide + 2 * workload.kv_heads * workload.head_dim
    extents = (wide, joined, workload.ffn, 2 * workload.ffn, workload.vocabulary)
    return min(workload.kv_heads, *(FeaturePlan(extent).count for extent in extents))
