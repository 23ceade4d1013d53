"""Hierarchical groups: first inside a host, then across hosts, with the bits of the flat group."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from isobit.errors import CutError


@dataclass(frozen=True)
class TwoLevelGroup:
    """The two process groups of a rank for a hierarchical all-reduce.

    The ranks of a host are consecutive, so their sum is a subtree of the flat tree.

    Args:
        inner: The ranks of this host.
        outer: The ranks that have the same local rank on every host.

    Raises:
        CutError: The inner ranks are not consecutive, or the outer ones are not one host apart.
    """

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup

    def __post_init__(self) -> None:
        """Check that both groups follow the flat tree."""
        inner, outer = (dist.get_process_group_ranks(group) for group in (self.inner, self.outer))
        step = inner[1] - inner[0] if len(inner) > 1 else 1
        across = outer[1] - outer[0] if len(outer) > 1 else step * len(inner)
        aligned = (
            _is_even(inner, step)
            and _is_even(outer, across)
            and (len(outer) == 1 or across == step * len(inner))
            and outer[dist.get_rank(self.outer)] == inner[dist.get_rank(self.inner)]
        )
        if not aligned:
            raise CutError(
                expected="an inner group of consecutive ranks, and an outer group with one rank "
                "of each inner group",
                received=f"inner ranks {inner} and outer ranks {outer}",
                remedy="take both groups from a DeviceMesh of shape (hosts, ranks per host)",
            )


def _is_even(ranks: list[int], step: int) -> bool:
    return step > 0 and all(rank == ranks[0] + index * step for index, rank in enumerate(ranks))
