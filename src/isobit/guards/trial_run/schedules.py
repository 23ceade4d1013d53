"""Know the schedules of learning rates that a program makes, and run them ahead of the program."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from isobit.guards.trial_run.judging import NotJudged

MOST_STEPS = 200_000  # of a schedule that are run ahead


class Schedules:
    """Schedules of a program, recorded while `recording` is open.

    Args:
        is_mine: Whether the current thread is the program's.

    Attributes:
        made: All of them; the parts of a schedule before the whole.
    """

    def __init__(self, is_mine: Callable[[], bool]) -> None:
        self.is_mine = is_mine
        self.made: list[LRScheduler] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace the constructor of torch's schedules by one that records."""
        plain = LRScheduler.__init__
        record = self

        @functools.wraps(plain)
        def create(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            if record.is_mine():
                record.made.append(self)

        LRScheduler.__init__ = create  # type: ignore[method-assign]
        try:
            yield
        finally:
            LRScheduler.__init__ = plain  # type: ignore[method-assign]

    def peak(
        self, optimizer: torch.optim.Optimizer, rates: list[float], steps: int
    ) -> tuple[str, float]:
        """Return the class of an optimizer's schedule, and its largest rate in a whole run.

        Args:
            optimizer: The optimizer.
            rates: Its largest rate in each step that it has taken; its schedule has been stepped between them.
            steps: Steps of the whole run.

        Raises:
            NotJudged: If the optimizer has not one schedule, or it cannot be run ahead.
        """
        made = [each for each in self.made if each.optimizer is optimizer]
        parts = {id(part) for each in made for part in getattr(each, "_schedulers", ())}
        whole = [each for each in made if id(each) not in parts]
        if len(whole) != 1:
            raise NotJudged(f"the optimizer has {len(whole)} schedules")
        schedule = whole[0]
        each, rest = divmod(schedule.last_epoch, max(1, len(rates) - 1))
        if len(rates) < 2 or rest or each < 1:
            raise NotJudged("the schedule is not stepped as often after each step")
        if each * steps > MOST_STEPS:
            raise NotJudged(f"the run has more than {MOST_STEPS} steps of its schedule")
        ahead = rates_of(schedule, each * max(0, steps - len(rates)))[each - 1 :: each]
        return type(schedule).__name__, max([*rates[:steps], *ahead])


def rates_of(schedule: LRScheduler, count: int) -> list[float]:
    """Return the largest rate of all groups after each further call of `step`, by a copy of the schedule.

    Raises:
        NotJudged: If it cannot be copied or stepped.
    """
    plain = (int, float, tuple)
    groups = [
        {**{k: v for k, v in group.items() if isinstance(v, plain)}, "params": [torch.zeros(1)]}
        for group in schedule.optimizer.param_groups
    ]
    stand_in = torch.optim.SGD(groups, lr=0.0)
    rates = []
    try:
        ahead: Any = copy.deepcopy(schedule, {id(schedule.optimizer): stand_in})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the stand-in takes no step
            for _ in range(count):
                ahead.step()
                rates.append(max(float(group["lr"]) for group in stand_in.param_groups))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise NotJudged(f"the schedule cannot be run ahead: {reason}") from error
    return rates
