"""What is checked after the steps, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from isobit import bits
from isobit.guards.live.adapter_base import base_weights
from isobit.guards.live.module_replay import unwrapped
from isobit.guards.live.optimizer_checks import name_some, parameters_of
from isobit.guards.trial_run.dtype_census import dtypes_are_as_asked
from isobit.guards.trial_run.evaluation import (
    as_many_rows_out_as_in,
    eval_output_is_batch_independent,
    evaluation_is_a_function,
)
from isobit.guards.trial_run.hyperparameters import optimizers_step
from isobit.guards.trial_run.loaders import epochs_differ, workers_yield_different_data
from isobit.guards.trial_run.observer import IGNORED, Observer
from isobit.guards.trial_run.report import Found, NotJudged
from isobit.guards.trial_run.step_order import (
    clipping_precedes_the_step,
    gradients_are_read_once,
    rates_are_not_zero,
    targets_weigh_the_same,
)
from isobit.guards.trial_run.training_mode import models_train_in_training_mode


def named_parameters(seen: Observer) -> dict[int, tuple[str, torch.Tensor]]:
    """Return the parameters of all models that were called, by id."""
    return {
        id(p): (name, p)
        for model, _ in seen.roots.values()
        for name, p in unwrapped(model).named_parameters()
    }


def trained_ids(seen: Observer) -> set[int]:
    """Return the ids of parameters that optimizers have, or have a copy of another dtype of.

    A copy has the same gradient, widened or rounded: master weights of fp32 for a model of 16 bits.
    """
    held = [p for optimizer in seen.optimizers for p in parameters_of(optimizer)]
    copies: dict[torch.Size, list[torch.Tensor]] = {}
    for each in held:
        if each.grad is not None:
            copies.setdefault(each.shape, []).append(each)

    def has_copy(p: torch.Tensor) -> bool:
        return p.grad is not None and any(
            w.dtype != p.dtype and w.grad is not None and bits.equal(w.grad, p.grad.to(w.dtype))
            for w in copies.get(p.shape, [])
        )

    ids = {id(p) for p in held}
    return ids | {key for key, (_, p) in named_parameters(seen).items() if has_copy(p)}


def optimizer_has_parameters(seen: Observer) -> Iterator[Found]:
    """Check that the optimizers have the parameters of the models that were called."""
    named = named_parameters(seen)
    held = trained_ids(seen) | {id(p) for each in seen.created.created for p in parameters_of(each)}
    trainable = {key: name for key, (name, p) in named.items() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in held]
    if not named:
        raise NotJudged("no model with parameters was called in training")
    if not trainable and not trains_something_else(seen, named):
        yield "nothing-trainable", "error", f"none of {len(named)} parameters requires a gradient"
    elif missing:
        yield (
            "not-in-optimizer",
            "error" if len(missing) == len(trainable) else "warning",
            f"{len(missing)} of {len(trainable)} trainable parameters are in no optimizer: {name_some(missing)}",
        )
    frozen = [name for name, p in named.values() if not p.requires_grad and p.ndim > 1]
    if frozen and trainable and all(named[key][1].ndim < 2 for key in trainable):
        yield (
            "weights-frozen",
            "warning",
            f"only {len(trainable)} biases or norms of {len(named)} parameters require a gradient; frozen: "
            f"{name_some(frozen)}",
        )


def trains_something_else(seen: Observer, named: dict[int, tuple[str, torch.Tensor]]) -> bool:
    """Return whether tensors outside of the models are trained, as an image whose style is transferred is."""
    others = [p for each in seen.optimizers for p in parameters_of(each) if id(p) not in named]
    return any(p.grad is not None and bool(p.grad.count_nonzero()) for p in others)


def only_trained_parameters_move(seen: Observer) -> Iterator[Found]:
    """Check that a parameter that is frozen, or in no optimizer, keeps its bits."""
    held = trained_ids(seen)
    told = {  # a watch has reported them, with the step
        id(p)
        for watch in seen.watches.values()
        if "base-weights-changed" in watch.reported
        for _, p in base_weights(watch.model)
    }
    rest = {
        key: (name, p)
        for key, (name, p) in named_parameters(seen).items()
        if key in seen.before and key not in told and not (p.requires_grad and key in held)
    }
    if not rest:
        raise NotJudged("every parameter is trained")
    moved = [name for key, (name, p) in rest.items() if bits.digest(p.detach()) != seen.before[key]]
    if moved:
        yield (
            "moved-though-frozen",
            "error",
            f"{len(moved)} of {len(rest)} parameters that are not trained have changed: {name_some(moved)}",
        )


def batches_differ(seen: Observer) -> Iterator[Found]:
    """Check that steps do not all see the same data."""
    batches = [batch for batch in seen.batches if batch]
    if len(batches) < 2:
        raise NotJudged(f"{len(batches)} steps with tensors as inputs")
    if len(set(batches)) == 1:
        if seen.evaluated & set(batches[0]):
            raise NotJudged(
                "the model was called with this batch without gradients before, as PPO does"
            )
        if seen.is_one_object() and not seen.loaders.epochs:
            raise NotJudged("every step is given the same tensor, and no DataLoader is used")
        yield (
            "same-batch",
            "warning",
            f"the inputs of {len(batches)} steps have the same bits: a loader starts again, or has one batch",
        )


def micro_batches_are_parts(seen: Observer) -> Iterator[Found]:
    """Check that the micro-batches of a step are parts of one batch."""
    if len(seen.optimizers) > 1:
        raise NotJudged("several optimizers: a backward may be a loss of its own")
    return targets_weigh_the_same(
        seen.losses.calls, seen.rows, seen.losses.unknown, seen.loaders.taken
    )


def every_optimizer_steps(seen: Observer) -> Iterator[Found]:
    """Check that no optimizer is left out whose parameters have gradients."""
    return optimizers_step(seen.created, model_names(seen))


def batches_have_targets(seen: Observer) -> Iterator[Found]:
    """Check that every loss has a target that counts.

    A mean over no target is NaN. A sum over none is 0, which a micro-batch may have, but not all of a step.
    """
    calls = [call for call in seen.losses.calls if call.classes]
    if not calls and not any("labels" in call.kwargs for _, call in seen.roots.values()):
        raise NotJudged("no loss over classes, and no model that is given labels")
    steps = {call.step for call in calls}
    empty = {c.step for c in calls if not c.has_targets and c.reduction == "mean"}
    empty |= {s for s in steps if not any(c.has_targets for c in calls if c.step == s)}
    for step in sorted(empty | (seen.empty - steps)):
        yield (
            "no-targets",
            "error",
            f"every label of a batch is {IGNORED} or the index that the loss ignores: there is nothing to learn, and a "
            "mean over no target is NaN; look at the collator, the mask of the prompt and the truncation",
            step,
        )


def model_names(seen: Observer) -> dict[int, str]:
    """Return the names of the models' parameters, by id."""
    return {key: name for key, (name, _) in named_parameters(seen).items()}


CHECKS: dict[str, Callable[[Observer], Iterator[Found]]] = {
    "optimizer has the parameters": optimizer_has_parameters,
    "every optimizer steps": every_optimizer_steps,
    "models train in training mode": lambda seen: models_train_in_training_mode(
        seen.roots, seen.in_eval, seen.optimizers
    ),
    "gradients are read once": lambda seen: gradients_are_read_once(seen.order, model_names(seen)),
    "rates are not zero": lambda seen: rates_are_not_zero(seen.order),
    "clipping precedes the step": lambda seen: clipping_precedes_the_step(
        seen.order, model_names(seen)
    ),
    "batches have targets": batches_have_targets,
    "only trained parameters move": only_trained_parameters_move,
    "batches differ": batches_differ,
    "workers yield different data": lambda seen: workers_yield_different_data(seen.loaders),
    "epochs differ": lambda seen: epochs_differ(seen.loaders),
    "as many rows out as in": as_many_rows_out_as_in,
    "micro-batches are parts of one batch": micro_batches_are_parts,
    "dtypes are as asked": lambda seen: dtypes_are_as_asked(
        seen.census, seen.losses.calls, seen.config
    ),
    "checkpoint reads back": lambda seen: seen.files.check(),
    "evaluation is a function": evaluation_is_a_function,
    "evaluation before training": lambda seen: seen.first.check(),
    "generation keeps to its limit": lambda seen: seen.generated.check(),
    "eval output is batch-independent": eval_output_is_batch_independent,
}
