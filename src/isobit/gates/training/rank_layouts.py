"""Rank layouts: data-parallel ranks × micro-batches × tensor-parallel ranks, and the wrapper."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from isobit.errors import ArgumentError, CutError
from isobit.gates.training.workload import Workload
from isobit.order.plan import FeaturePlan
from isobit.parallel.data.global_batch import GlobalBatch

ENGINES = ("isobit", "ddp", "fsdp2")
MOST_RANKS = 32
WRAPPED = ((2, 1), (2, 4), (4, 2), (8, 1))  # (data, micro) of DDP and FSDP2, besides the grid


@dataclass(frozen=True, order=True)
class RankLayout:
    """One way to spread a global batch over `data` × `tensor` ranks."""

    data: int = 1  # data-parallel ranks
    micro: int = 1  # micro-batches per rank and step
    tensor: int = 1  # tensor-parallel ranks
    engine: str = "isobit"  # "isobit" is the plain model; otherwise the wrapper

    def __post_init__(self) -> None:
        """Check the wrapper."""
        if self.engine not in ENGINES:
            raise ArgumentError(
                expected=f"one of {', '.join(ENGINES)}",
                received=repr(self.engine),
                remedy="pass one of these",
            )
        if self.engine != "isobit" and (self.tensor > 1 or self.data == 1):
            raise CutError(
                expected=f"{self.engine} over two data-parallel ranks or more, without "
                "tensor parallelism",
                received=str(self),
                remedy="use the engine 'isobit' for tensor parallelism, and for one rank",
            )

    @property
    def ranks(self) -> int:
        """The number of ranks in all."""
        return self.data * self.tensor

    def __str__(self) -> str:
        """Return a name such as "ddp 2×2×1" (data × micro × tensor)."""
        return f"{self.engine} {self.data}×{self.micro}×{self.tensor}"


def layout_grid(
    workload: Workload, data: int = 8, micro: int = 8, tensor: int = 4
) -> list[RankLayout]:
    """Return every layout of powers of two that the samples, the model and 32 ranks allow.

    Layouts of DDP and FSDP2 follow at the end.
    """
    powers = [[1 << i for i in range(most.bit_length())] for most in (data, micro, tensor)]
    found = [
        RankLayout(d, m, t)
        for d, m, t in itertools.product(*powers)
        if d * m <= workload.samples and d * t <= MOST_RANKS and t <= widest_tensor(workload)
    ]
    wrapped = [(d, m) for d, m in WRAPPED if d <= data and m <= micro and d * m <= workload.samples]
    return found + [RankLayout(d, m, 1, engine) for engine in ENGINES[1:] for d, m in wrapped]


def check_layout(layout: RankLayout, workload: Workload) -> None:
    """Check, before training, that the samples and the model can be divided like this.

    Raises:
        CutError: They cannot.
    """
    GlobalBatch(workload.samples, layout.data, layout.micro)
    widest = widest_tensor(workload)
    if layout.tensor not in [1 << i for i in range(widest.bit_length())]:
        raise CutError(
            expected=f"a power of two of tensor-parallel ranks, at most {widest}",
            received=str(layout),
            remedy="choose fewer, or a wider workload",
        )


def widest_tensor(workload: Workload) -> int:
    """Return the largest number of tensor-parallel ranks that every split axis allows."""
    wide = workload.heads * workload.head_dim
    joined = wide + 2 * workload.kv_heads * workload.head_dim
    extents = (wide, joined, workload.ffn, 2 * workload.ffn, workload.vocabulary)
    return min(workload.kv_heads, *(FeaturePlan(extent).count for extent in extents))
