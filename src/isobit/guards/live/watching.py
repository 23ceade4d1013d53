"""`watch`: check every step of a training run, by hooks on the model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from isobit.errors import ArgumentError
from isobit.guards.live.emitter import Emitter
from isobit.guards.live.events import Event
from isobit.guards.live.optimizer_checks import unwrapped_optimizer
from isobit.guards.live.step_checks import POLICIES, Options
from isobit.guards.live.watch_hooks import Watch
from isobit.guards.live.watch_options import Intervals, Replicas, Resume, with_old_keywords
from isobit.parallel.tensor.shard import find_shards, is_dtensor

Policy = str | Callable[[Event], object]


def watch(
    model: nn.Module,
    optimizer: Any,
    *,
    policy: Policy = "log",
    sinks: Iterable[Any] | None = None,
    run: str = "",
    max_norm: float | None = None,
    config: Mapping[str, Any] | None = None,
    other_optimizers: Iterable[Any] = (),
    blocks: bool = False,
    intervals: Intervals = Intervals(),  # noqa: B008
    resume: Resume = Resume(),  # noqa: B008
    replicas: Replicas = Replicas(),  # noqa: B008
    **old: Any,
) -> Watch:
    """Check every step of a training run. See docs/how-to/watch-a-run.md for what is checked.

    Args:
        model: The model that the training loop calls.
        optimizer: The optimizer whose `step` updates it, also one that Accelerate has wrapped.
        policy: What to do with a finding of severity "error", besides sending it to the sinks: "log" does nothing,
            "raise" raises GuardError, "skip" leaves the weights as they are in this step; a function is called with the
            finding, and skips the step if it returns "skip". A step can be skipped only for what is found before it.
        sinks: Where events go, as for `Emitter`; None is the logger `isobit.guards`.
        run: The name of the run.
        max_norm: The limit of the global gradient norm after clipping.
        config: The configuration of the run, such as a YAML file as it was read: the hyperparameters that it has must
            be those of every group of this optimizer; a weight decay of 0 is allowed.
        other_optimizers: Those that train the rest of the model, each with a watch of its own.
        blocks: Sample every block's input, output and gradient now and then (`Intervals(blocks=)`), to name a block
            that computes something wrong, or whose numbers are far larger or smaller than its neighbours'.
        intervals: How often it looks at weights and gradients, and sends metrics.
        resume: The checkpoint that the run continues from.
        replicas: The ranks whose parameters must be equal.
        old: Keywords of the last release, which are now fields of the three above; each gives a DeprecationWarning.

    Returns:
        The watch, which ends with `close()` or the end of a `with` block.

    Raises:
        ArgumentError: If an argument is not supported.
        GuardError: With the policy "raise", for a finding.

    Example:
        >>> from isobit.guards import watch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with watch(model, optimizer, policy="skip", sinks=[]) as guard:
        ...     for step in range(3):
        ...         x = torch.full((2, 4), float("nan") if step == 1 else 1.0)
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        >>> print(guard.findings[0])
        step 1, rank 0: nonfinite-gradient: bias: 1 of 1 elements are not finite, first at [0]: nan; 2 of 2 gradients in
        all; the input of the model is not finite
        >>> guard.steps, guard.nonfinite_steps, guard.skipped_steps
        (3, 1, 1)
    """
    if not (callable(policy) or policy in POLICIES):
        raise ArgumentError(
            expected=f"a policy of {POLICIES}, or a function",
            received=repr(policy),
            remedy="choose one of these",
        )
    groups = {"intervals": intervals, "resume": resume, "replicas": replicas}
    given = with_old_keywords(groups, old)
    intervals, resume, replicas = given["intervals"], given["resume"], given["replicas"]
    looks = intervals.gradients
    if looks is None:
        looks = 4 if policy == "log" else 1
    check_counts(max_norm, replace(intervals, gradients=looks), replicas.every)
    is_sharded = bool(find_shards(model)) or any(map(is_dtensor, model.parameters()))
    if is_sharded and replicas.group is None and policy not in ("log", "raise"):
        raise ArgumentError(
            expected="a group of ranks that skip a step together",
            received="a model with sharded parameters, a policy that may skip, and no group",
            remedy="pass replicas=Replicas(group=torch.distributed.group.WORLD), or policy='raise'",
        )
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    options = Options(
        policy=policy,
        max_norm=max_norm,
        every=intervals.weights,
        patience=intervals.patience,
        first_step=resume.first_step,
        resumed_from=resume.digest,
        agree_every=replicas.every,
        group=replicas.group,
        tensor_group=replicas.tensor_group,
        sharded=tuple(replicas.sharded),
        is_sharded=is_sharded,
        gradients_every=looks,
        weights_from=resume.weights,
        other_optimizers=tuple(map(unwrapped_optimizer, other_optimizers)),
        metrics_every=intervals.metrics,
        config=config,
        blocks_every=intervals.blocks if blocks else None,
    )
    emitter = Emitter(sinks, run=run, rank=rank)
    return Watch(model, unwrapped_optimizer(optimizer), options, emitter)


def check_counts(max_norm: float | None, intervals: Intervals, agree: int | None) -> None:
    """Raise ArgumentError if a number of steps, or the limit of the norm, is not positive."""
    numbers = {f"Intervals({name}={number})": number for name, number in vars(intervals).items()}
    if agree is not None:
        numbers[f"Replicas(every={agree})"] = agree
    wrong = [name for name, number in numbers.items() if number < 1]
    wrong += [f"max_norm={max_norm}"] if max_norm is not None and not max_norm > 0 else []
    if wrong:
        raise ArgumentError(
            expected="fields of Intervals and every of Replicas of at least 1, and a positive max_norm",
            received=", ".join(wrong),
            remedy="leave out what should not be checked",
        )
