"""`watch`: check every step of a training run, by hooks on the model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from isobit.errors import ArgumentError
from isobit.guards.live.emitter import Emitter
from isobit.guards.live.events import Event
from isobit.guards.live.optimizer_checks import unwrapped_optimizer
from isobit.guards.live.step_checks import POLICIES, Options
from isobit.guards.live.watch_hooks import Watch
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
    every: int = 100,
    gradients_every: int | None = None,
    patience: int = 10,
    first_step: int = 0,
    resumed_from: str | None = None,
    weights_from: Mapping[str, Tensor] | None = None,
    other_optimizers: Iterable[Any] = (),
    agree_every: int | None = None,
    group: dist.ProcessGroup | None = None,
    tensor_group: dist.ProcessGroup | None = None,
    sharded: Iterable[str] = (),
    metrics_every: int = 1,
    config: Mapping[str, Any] | None = None,
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
        every: Steps between looks at the weights, at the optimizer's state and at how far weights move, and between
            metrics of blocks.
        gradients_every: Steps between looks at all gradients, after the first `patience` steps; between them, 4,096
            elements of 4 gradients are read. None is 4, or 1 with a policy that raises or skips.
        patience: Steps after which a parameter that never had a gradient, or only zeros, is reported.
        first_step: The number of the first step, for a run that is resumed.
        resumed_from: What `state_digest` returned when the checkpoint was saved.
        weights_from: Tensors of a checkpoint by name: those that the model has must have the same bits before the
            first step.
        other_optimizers: Those that train the rest of the model, each with a watch of its own.
        agree_every: Steps between comparisons of parameters over `group` and `tensor_group`; None compares nothing.
            Every rank of these groups must watch.
        group: Ranks that have equal parameters, for `agree_every`, and that skip a step together under a policy that
            skips: with sharded parameters, all ranks. Without it, ranks do not skip for a loss that diverges, which
            is one rank's own.
        tensor_group: The ranks of a tensor-parallel group, for `agree_every`: what `replicated_tensors` returns is
            compared there.
        sharded: Patterns of names that are sharded by hand, for `replicated_tensors`.
        metrics_every: Steps between metrics of the loss, the gradient norm (of steps that read all gradients) and the
            learning rates.
        config: The configuration of the run, such as a YAML file as it was read: the hyperparameters that it has must
            be those of every group of this optimizer; a weight decay of 0 is allowed.

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
    looks = gradients_every if gradients_every is not None else 4 if policy == "log" else 1
    check_counts(max_norm, every, looks, patience, agree_every, metrics_every)
    is_sharded = bool(find_shards(model)) or any(map(is_dtensor, model.parameters()))
    if is_sharded and group is None and policy not in ("log", "raise"):
        raise ArgumentError(
            expected="a group of ranks that skip a step together",
            received="a model with sharded parameters, a policy that may skip, and no group",
            remedy="pass group=torch.distributed.group.WORLD, or policy='raise'",
        )
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    options = Options(
        policy,
        max_norm,
        every,
        patience,
        first_step,
        resumed_from,
        agree_every,
        group,
        tensor_group,
        tuple(sharded),
        is_sharded,
        looks,
        weights_from,
        tuple(map(unwrapped_optimizer, other_optimizers)),
        metrics_every,
        config,
    )
    emitter = Emitter(sinks, run=run, rank=rank)
    return Watch(model, unwrapped_optimizer(optimizer), options, emitter)


def check_counts(
    max_norm: float | None,
    every: int,
    looks: int,
    patience: int,
    agree_every: int | None,
    metrics_every: int,
) -> None:
    """Raise ArgumentError if a number of steps, or the limit of the norm, is not positive."""
    numbers = {
        "every": every,
        "gradients_every": looks,
        "patience": patience,
        "metrics_every": metrics_every,
    }
    if agree_every is not None:
        numbers["agree_every"] = agree_every
    wrong = [f"{name}={number}" for name, number in numbers.items() if number < 1]
    wrong += [f"max_norm={max_norm}"] if max_norm is not None and not max_norm > 0 else []
    if wrong:
        raise ArgumentError(
            expected="every, gradients_every, metrics_every, patience and agree_every of at least 1, and a positive "
            "max_norm",
            received=", ".join(wrong),
            remedy="leave out what should not be checked",
        )
