"""Check that models are trained in training mode.

[Note: training in eval mode]
A call in eval mode belongs to training if a backward passes through its output and the optimizer that steps next has
parameters of the model: a discriminator that only passes gradients on, a frozen network that measures a distance, and
an evaluation without `no_grad` do not. Whether the mode matters is tried: the call is repeated in eval mode and in
training mode, with the same random numbers, and the outputs are compared. Parts whose parameters are all frozen stay in
eval mode in both, so that a classifier on frozen features, whose statistics must not move, is right. So is a model with
any part in training mode: its author has set the modes one by one. A model without dropout or running statistics
computes the same in both modes, and is right too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from isobit.guards.live.module_replay import ModelCall, unwrapped
from isobit.guards.live.optimizer_checks import parameters_of
from isobit.guards.trial_run.asking import outputs_of
from isobit.guards.trial_run.report import Found, NotJudged


@dataclass
class EvalCall:
    """A call of a model in eval mode with gradients enabled.

    Attributes:
        model: The model.
        call: The call.
        given: What it was called with.
        returned: The shape of its first output.
        was_reached: Whether a backward passed through the output.
    """

    model: nn.Module
    call: ModelCall
    given: list[torch.Tensor]
    returned: torch.Size | None
    was_reached: bool = False

    def note_backward(self, gradient: torch.Tensor) -> None:
        """Note that a backward has reached the output."""
        self.was_reached = True


def models_train_in_training_mode(
    roots: dict[int, tuple[nn.Module, ModelCall]],
    in_eval: set[int],
    optimizers: list[torch.optim.Optimizer],
) -> Iterator[Found]:
    """Yield a finding for each model that is trained in eval mode only, where that changes what it computes.

    Args:
        roots: The models that are trained, by id.
        in_eval: Those that were trained in eval mode only.
        optimizers: Those that stepped.

    Raises:
        NotJudged: If no model was trained, or one cannot be run in both modes.
    """
    if not roots:
        raise NotJudged("no model was called in training")
    trained = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    for key in in_eval & set(roots):
        model, call = unwrapped(roots[key][0]), roots[key][1]
        if any(module.training for module in model.modules()):
            continue
        try:
            ours = outputs_of(model, call, 1)
            with training(model, trained):
                others = outputs_of(model, call, 1)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise NotJudged(
                f"{type(model).__name__} is trained in eval mode, and fails when called again: {reason}"
            ) from error
        where = next((a[0] for a, b in zip(ours, others, strict=False) if a != b), None)
        if where is not None or len(ours) != len(others):
            part = type(model.get_submodule(where or "")).__name__
            yield (
                "trained-in-eval-mode",
                "error",
                f"{type(model).__name__} is trained in eval mode; in training mode it computes something else, first "
                f"in {where or 'the model'} ({part}): call model.train() before the loop",
            )


@contextmanager
def training(model: nn.Module, trained: set[int]) -> Iterator[None]:
    """Put the parts of a model that are trained in training mode, and all of them back at the end."""
    modes = {module: module.training for module in model.modules()}

    def put(module: nn.Module, outer: bool) -> None:
        every = [id(p) for p in module.parameters()]
        own = [id(p) for p in module.parameters(recurse=False)]
        is_trained = outer if not every else not trained.isdisjoint(own or every)
        module.training = is_trained
        for child in module.children():
            put(child, is_trained)

    put(model, True)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
