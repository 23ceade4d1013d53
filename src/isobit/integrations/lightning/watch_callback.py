"""`WatchCallback`: `isobit.guards.watch` for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from isobit.guards.live.watching import Resume, Watch, watch


class WatchCallback(Callback):
    """Watches every optimizer of a Lightning run.

    Lightning calls `training_step`, not the module, so the module where numbers stop being finite is named only if
    `training_step` calls `self(...)`. Losses are those of the closure, which Lightning has divided by the number of
    micro-batches.

    Args:
        options: Of `isobit.guards.watch`. `max_norm` is the Trainer's `gradient_clip_val` unless given.

    Attributes:
        watches: One per optimizer of the last run.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.watches: list[Watch] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start a watch per optimizer; those that an exception has left open are ended first."""
        self.close()
        clips = trainer.gradient_clip_algorithm in (None, "norm")
        options: dict[str, Any] = {
            "max_norm": (trainer.gradient_clip_val or None) if clips else None,
            "resume": Resume(first_step=trainer.global_step),
            **self.options,
        }
        self.watches = []
        for optimizer in trainer.optimizers:
            others = [each for each in trainer.optimizers if each is not optimizer]
            given = {"other_optimizers": others, **options}
            self.watches.append(watch(trainer.model, optimizer, **given))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the watches."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watches of a run that fails; its weights are not read again."""
        for each in self.watches:
            each.__exit__(type(exception), exception, None)

    def close(self) -> None:
        """End the watches."""
        for each in self.watches:
            each.close()
