"""The arguments of `watch` that belong together: how often it looks, where a run resumes, which ranks are replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.foundation.renaming import warn_renamed


@dataclass(frozen=True)
class Intervals:
    """How often a watch looks, in steps.

    Attributes:
        weights: Steps between looks at the weights, at the optimizer's state and at how far weights move, and between
            metrics of blocks.
        gradients: Steps between looks at all gradients, after the first `patience` steps; between them, 4,096 elements
            of 4 gradients are read. None is 4, or 1 with a policy that raises or skips.
        metrics: Steps between metrics of the loss, the gradient norm (of steps that read all gradients) and the
            learning rates.
        patience: Steps after which a parameter that never had a gradient, or only zeros, is reported.
        blocks: Steps between samples of blocks, with `watch(blocks=True)`; the first two steps are sampled too.

    Example:
        >>> isobit.guards.Intervals(gradients=1).weights
        100
    """

    weights: int = 100
    gradients: int | None = None
    metrics: int = 1
    patience: int = 10
    blocks: int = 20


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run continues from.

    Attributes:
        first_step: The number of the first step.
        digest: What `state_digest` returned when the checkpoint was saved.
        weights: Tensors of a checkpoint by name: those that the model has must have the same bits before the first
            step.

    Example:
        >>> isobit.guards.Resume(first_step=500).digest is None
        True
    """

    first_step: int = 0
    digest: str | None = None
    weights: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Replicas:
    """The ranks whose parameters must be equal. Every rank of the groups must watch.

    Attributes:
        every: Steps between comparisons of parameters over `group` and `tensor_group`; None compares nothing.
        group: Ranks that have equal parameters, and that skip a step together under a policy that skips: with sharded
            parameters, all ranks. Without it, ranks do not skip for a loss that diverges, which is one rank's own.
        tensor_group: The ranks of a tensor-parallel group: what `replicated_tensors` returns is compared there.
        sharded: Patterns of names that are sharded by hand, for `replicated_tensors`.

    Example:
        >>> isobit.guards.Replicas(every=100).group is None
        True
    """

    every: int | None = None
    group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    sharded: Iterable[str] = ()


# keyword of the last release -> argument and field
RENAMED = {
    "every": ("intervals", "weights"),
    "gradients_every": ("intervals", "gradients"),
    "metrics_every": ("intervals", "metrics"),
    "patience": ("intervals", "patience"),
    "first_step": ("resume", "first_step"),
    "resumed_from": ("resume", "digest"),
    "weights_from": ("resume", "weights"),
    "agree_every": ("replicas", "every"),
    "group": ("replicas", "group"),
    "tensor_group": ("replicas", "tensor_group"),
    "sharded": ("replicas", "sharded"),
}


def with_old_keywords(groups: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups with the values of keywords of the last release, each with a DeprecationWarning.

    Raises:
        ArgumentError: If a group is of another type.
        TypeError: If a keyword is unknown, as for any function.
    """
    kinds = {"intervals": Intervals, "resume": Resume, "replicas": Replicas}
    found: dict[str, Any] = dict(groups)
    for name, kind in kinds.items():
        if not isinstance(found[name], kind):
            raise ArgumentError(
                expected=f"{name}=isobit.guards.{kind.__name__}(...)",
                received=f"{type(found[name]).__name__} {found[name]!r}"[:80],
                remedy=f"from isobit.guards import {kind.__name__}",
            )
    for keyword, value in old.items():
        if keyword not in RENAMED:
            raise TypeError(f"watch() got an unexpected keyword argument {keyword!r}")
        group, field = RENAMED[keyword]
        warn_renamed(f"{keyword}=", f"{group}={kinds[group].__name__}({field}=)", "watch", level=4)
        found[group] = replace(found[group], **{field: value})
    return found
