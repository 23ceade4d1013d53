"""What is checked after the steps: which parameters moved, whether evaluation is a function, whether batches differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from isobit import bits
from isobit.guards.module_replay import ModelCall, as_it_was, hooked_call, tensors_in, unwrapped
from isobit.guards.optimizer_checks import name_some, parameters_of
from isobit.guards.trial_run.observer import Observer, can_digest

Found = tuple[str, str, str]  # rule, severity, message


class NotJudged(Exception):
    """A program that a check cannot judge, with the reason."""


def named_parameters(seen: Observer) -> dict[int, tuple[str, torch.Tensor]]:
    """Return the parameters of all models that were called, by id."""
    return {
        id(p): (name, p)
        for model, _ in seen.roots.values()
        for name, p in unwrapped(model).named_parameters()
    }


def optimizer_has_parameters(seen: Observer) -> Iterator[Found]:
    """Check that the optimizers have the parameters of the models that were called."""
    named = named_parameters(seen)
    held = {id(p) for optimizer in seen.optimizers for p in parameters_of(optimizer)}
    trainable = {key: name for key, (name, p) in named.items() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in held]
    if not named:
        raise NotJudged("no model with parameters was called in training mode")
    if not trainable:
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


def only_trained_parameters_move(seen: Observer) -> Iterator[Found]:
    """Check that a parameter that is frozen, or in no optimizer, keeps its bits."""
    held = {id(p) for optimizer in seen.optimizers for p in parameters_of(optimizer)}
    rest = {
        key: (name, p)
        for key, (name, p) in named_parameters(seen).items()
        if key in seen.before and not (p.requires_grad and key in held)
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
        yield (
            "same-batch",
            "warning",
            f"the inputs of {len(batches)} steps have the same bits: a loader starts again, or has one batch",
        )


def evaluation_is_a_function(seen: Observer) -> Iterator[Found]:
    """Check that a model in eval mode gives the same bits twice, with other random numbers."""
    if not seen.roots:
        raise NotJudged("no model was called in training mode")
    for model, call in seen.roots.values():
        inner = unwrapped(model)
        modes = {module: module.training for module in inner.modules()}
        inner.eval()
        try:
            first, second = (outputs_of(inner, call, seed) for seed in (1, 2))
        except Exception as error:
            raise NotJudged(
                f"the model fails in eval mode: {type(error).__name__}: {error}"
            ) from error
        finally:
            for module, mode in modes.items():
                module.training = mode
        wrong = next((a[0] for a, b in zip(first, second, strict=False) if a != b), None)
        if wrong is not None or len(first) != len(second):
            yield (
                "eval-is-random",
                "error",
                "in eval mode the same input gives other bits the second time, first in "
                f"{wrong or 'the model'} ({type(inner.get_submodule(wrong or '')).__name__}): "
                "dropout that ignores the mode, or another random number",
            )


def outputs_of(model: nn.Module, call: ModelCall, seed: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return the digests of every module's outputs, in the order in which the modules end."""
    found: list[tuple[str, tuple[str, ...]]] = []

    def after(name: str, module: nn.Module, output: Any) -> None:
        tensors = [t for t in tensors_in(output) if can_digest(t)]
        found.append((name, tuple(bits.digest(tensor.detach().cpu()) for tensor in tensors)))

    with torch.no_grad(), as_it_was(model, call):
        torch.manual_seed(seed)
        hooked_call(model, call, lambda *_: None, after)
    return found


CHECKS = {
    "optimizer has the parameters": optimizer_has_parameters,
    "only trained parameters move": only_trained_parameters_move,
    "batches differ": batches_differ,
    "evaluation is a function": evaluation_is_a_function,
}
