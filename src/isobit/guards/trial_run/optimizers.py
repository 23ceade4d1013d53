"""Know every optimizer that a program creates, so that a run ends when all of them have stepped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isobit.guards.live.optimizer_checks import name_some, parameters_of
from isobit.guards.trial_run.judging import Found, NotJudged

LONGEST = 8  # times the steps of a trial that a run goes on for an optimizer that steps seldom


class Optimizers:
    """Optimizers of a program, recorded while `recording` is open.

    Args:
        is_mine: Whether the current thread is the program's.

    Attributes:
        created: All of them.
        steps: How often each that has stepped has done so, in the order of their first steps.
    """

    def __init__(self, is_mine: Callable[[], bool]) -> None:
        self.is_mine = is_mine
        self.created: list[torch.optim.Optimizer] = []
        self.steps: dict[torch.optim.Optimizer, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace the constructor of `torch.optim.Optimizer`, which those of all packages call, by one that records."""
        plain = torch.optim.Optimizer.__init__
        record = self

        @functools.wraps(plain)
        def create(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            if record.is_mine():
                record.created.append(self)

        torch.optim.Optimizer.__init__ = create  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.optim.Optimizer.__init__ = plain  # type: ignore[method-assign]

    def idle(self) -> list[tuple[torch.optim.Optimizer, list[Tensor]]]:
        """Return the optimizers that have not stepped, with the parameters that no other trains."""
        trained = {id(p) for optimizer in self.steps for p in parameters_of(optimizer)}
        found = []
        for optimizer in self.created:
            own = [p for p in parameters_of(optimizer) if id(p) not in trained and p.requires_grad]
            if optimizer not in self.steps and own:
                found.append((optimizer, own))
        return found

    def are_done(self, steps: int) -> bool:
        """Return whether every optimizer has taken its steps, or another one so many that it will not."""
        most = max(self.steps.values(), default=0)
        return most >= LONGEST * steps or (
            min(self.steps.values(), default=0) >= steps and not self.idle()
        )


def optimizers_step(seen: Optimizers, names: dict[int, str]) -> Iterator[Found]:
    """Yield a finding for each optimizer that never steps though its parameters have gradients.

    Args:
        seen: The optimizers.
        names: Parameters of the models that were called, by id.

    Raises:
        NotJudged: If none without a step was created, or it had no time to step.
    """
    idle = seen.idle()
    if not idle:
        return
    most = max(seen.steps.values(), default=0)
    if most < LONGEST:
        raise NotJudged(f"{len(idle)} optimizers have not stepped while another took {most} steps")
    for optimizer, own in idle:
        waiting = [p for p in own if p.grad is not None and bool(p.grad.count_nonzero())]
        if waiting:
            which = [names.get(id(p), "a parameter outside the models") for p in waiting]
            yield (
                "optimizer-not-stepped",
                "warning",
                f"{type(optimizer).__name__} never steps, while another optimizer took {most} steps and "
                f"{len(waiting)} of its parameters have gradients: {name_some(which)}",
            )
