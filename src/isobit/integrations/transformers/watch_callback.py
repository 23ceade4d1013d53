"""`WatchCallback`: `isobit.guards.watch` for transformers' Trainer."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from isobit.guards.live.watch_hooks import Watch
from isobit.guards.live.watch_options import Resume
from isobit.guards.live.watching import watch


class WatchCallback(TrainerCallback):
    """Watches a Trainer's run: losses before the Trainer's filter replaces NaN, gradients after clipping, weights.

    Args:
        options: Of `isobit.guards.watch`. `max_norm` is the Trainer's `max_grad_norm` unless given.

    Attributes:
        watch: The watch of the last run; None before it.

    Example:
        >>> from isobit.integrations.transformers import WatchCallback
        >>> callback = WatchCallback(policy="raise")  # Trainer(..., callbacks=[callback])
        >>> callback.watch is None
        True
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.watch: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Start a watch; one that an exception has left open is ended first."""
        self.on_train_end(args, state, control)
        options = {"max_norm": args.max_grad_norm or None, **self.options}
        options.setdefault("resume", Resume(first_step=state.global_step))
        self.watch = watch(given["model"], given["optimizer"], **options)
        message = miscounted_steps(args, state, given.get("train_dataloader"))
        if message:
            self.watch.report("steps-miscounted", message)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End the watch."""
        if self.watch is not None:
            self.watch.close()


def miscounted_steps(args: TrainingArguments, state: TrainerState, loader: Any) -> str:
    """Return a sentence if the Trainer's step count does not match its configuration, or nothing.

    Args:
        args: The configuration.
        state: What the Trainer plans.
        loader: The training batches of this rank; one without a length is not judged.
    """
    try:
        batches = len(loader)
    except TypeError:
        return ""
    accumulated = args.gradient_accumulation_steps
    per_epoch = max(batches // accumulated + bool(batches % accumulated), 1)
    expected = (
        args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    )
    if state.max_steps == expected:
        return ""
    return (
        f"{state.max_steps} steps are planned, and {expected} follow from the configuration: "
        f"{args.num_train_epochs:g} epochs of {batches} batches, {accumulated} per step"
        + (f", max_steps {args.max_steps}" if args.max_steps > 0 else "")
    )
