"""Compare the hyperparameters of a configuration with those that reached the optimizer."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from isobit.guards.configured_steps import read_counts
from isobit.guards.live.optimizer_checks import name_some, parameters_of
from isobit.guards.trial_run.report import Found, NotJudged

# name in an optimizer's groups -> its names in configurations: our own, transformers', DeepSpeed's
NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("lr", "learning_rate"),
    "beta1": ("beta1", "adam_beta1"),
    "beta2": ("beta2", "adam_beta2"),
    "eps": ("eps", "adam_epsilon", "epsilon"),
    "weight_decay": ("weight_decay",),
    "momentum": ("momentum",),
}
OWN = ("lr", "weight_decay")  # may be an optimizer's own: Muon next to AdamW has another rate
LIMIT_NAMES = ("max_norm", "max_grad_norm", "gradient_clipping", "clip_grad_norm", "grad_clip")


def expected_values(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of a configuration, also of nested ones; of two with one name, the outer counts.

    Args:
        config: A configuration, such as a YAML or JSON file as it was read.
    """
    found: dict[str, float] = {}
    for key, names in NAMES.items():
        value = next((config[name] for name in names if is_number(config.get(name))), None)
        if value is not None:
            found[key] = float(value)
    betas = config.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2 and all(map(is_number, betas)):
        found = {"beta1": float(betas[0]), "beta2": float(betas[1])} | found
    for inner in config.values():
        if isinstance(inner, Mapping):
            found = expected_values(inner) | found
    return found


def expected_limit(config: Mapping[str, Any]) -> float | None:
    """Return the limit of the gradient norm that a configuration has, also a nested one; None or 0 is no limit.

    Args:
        config: A configuration.
    """
    for name in LIMIT_NAMES:
        if is_number(config.get(name)):
            return float(config[name]) or None
    inner = (expected_limit(each) for each in config.values() if isinstance(each, Mapping))
    return next((limit for limit in inner if limit is not None), None)


def is_number(value: Any) -> bool:
    """Return whether a value is a number, also one in YAML's text form of 1e-4."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def values_in(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of a parameter group. With a schedule, the rate is the one before it."""
    found = {"lr": group.get("initial_lr", group.get("lr"))}
    found |= {name: group.get(name) for name in ("eps", "weight_decay", "momentum")}
    if isinstance(group.get("betas"), tuple | list):
        found |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
    # Adafactor has a pair of eps, and chooses its own rate.
    numbers = {name: value for name, value in found.items() if not isinstance(value, tuple | list)}
    return {name: float(value) for name, value in numbers.items() if value is not None}


def is_near(value: float | None, wanted: float) -> bool:
    """Return whether a value is the configuration's."""
    return value is not None and math.isclose(value, wanted, rel_tol=1e-6)


def check_hyperparameters(
    expected: Mapping[str, float],
    optimizers: list[torch.optim.Optimizer],
    config: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yield a sentence for each value of an optimizer that is not the configuration's.

    Every group of every optimizer is compared. A group may have a weight decay of 0: biases and norms often do. A value
    that an optimizer does not have is not compared: SGD has no eps. If one optimizer has the configured rate or decay,
    another may have its own, but not its class's default; betas, eps and momentum may be another's own only if the
    configuration names that value too, in a section of its own.

    Args:
        expected: What the configuration says.
        optimizers: Every optimizer of the run.
        config: The configuration, for values in its other sections.
    """
    reached = {
        name
        for name, wanted in expected.items()
        for optimizer in optimizers
        if all(is_near(values_in(group).get(name), wanted) for group in optimizer.param_groups)
    }
    named = {name: values_named(config or {}, name) for name in expected}
    for optimizer in optimizers:
        known = defaults_of(optimizer)
        groups = [values_in(group) for group in optimizer.param_groups]
        for name, wanted in expected.items():
            held = [group[name] for group in groups if name in group]
            wrong = [value for value in held if not is_near(value, wanted)]
            if name == "weight_decay" and len(wrong) < len(held):
                wrong = [value for value in wrong if value != 0]
            if name in reached:  # by another optimizer
                wrong = [v for v in wrong if not any(is_near(v, each) for each in named[name])]
                if name in OWN:
                    wrong = [value for value in wrong if is_near(known.get(name), value)]
            if wrong:
                kind = type(optimizer).__name__
                is_default = known.get(name) == wrong[0]
                default, owner = (f" ({kind}'s default)", "") if is_default else ("", f" of {kind}")
                yield (
                    f"{name} is {wanted:g} in the configuration and {wrong[0]:g}{default} in {len(wrong)} of "
                    f"{len(held)} parameter groups{owner}"
                )


def defaults_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the defaults of an optimizer's class; a subclass may pass options on to one that names them."""
    found = {
        name: parameter.default
        for each in reversed(type(optimizer).__mro__)
        if "__init__" in vars(each)
        for name, parameter in inspect.signature(vars(each)["__init__"]).parameters.items()
    }
    return values_in({k: v for k, v in found.items() if is_number(v) or k == "betas"})


def values_named(config: Mapping[str, Any], name: str) -> list[float]:
    """Return every value that a configuration has for a hyperparameter, in all its sections."""
    inner = [each for each in config.values() if isinstance(each, Mapping)]
    own = expected_values({k: v for k, v in config.items() if not isinstance(v, Mapping)})
    found = [own[name]] if name in own else []
    return found + [value for each in inner for value in values_named(each, name)]


def name_defaults(
    expected: Mapping[str, float], optimizers: list[torch.optim.Optimizer]
) -> Iterator[str]:
    """Yield a sentence per optimizer with the fields that equal its class's default and no configuration names.

    Args:
        expected: What the configuration says.
        optimizers: Every optimizer of the run.
    """
    for at, optimizer in enumerate(optimizers):
        known = defaults_of(optimizer)
        groups = [values_in(group) for group in optimizer.param_groups]
        fields = [
            f"{name} {value:g}"
            for name, value in known.items()
            if name not in expected and any(is_near(group.get(name), value) for group in groups)
        ]
        if fields:
            which = f" {at}" if len(optimizers) > 1 else ""
            yield (
                f"{type(optimizer).__name__}{which} has its class's default, which no configuration names, in "
                f"{', '.join(fields)}"
            )


def check_warm_up(
    rates: list[float], config: Mapping[str, Any], peak: float | None
) -> Iterator[str]:
    """Yield a sentence if a configuration has a warm-up, and the first step already has the whole rate.

    Args:
        rates: The learning rate of the first optimizer's first group, per step.
        config: The configuration.
        peak: Its learning rate.
    """
    steps = read_counts(config).get("warmup_steps", 0)
    if steps > 1 and peak and rates and rates[0] >= peak * (1 - 1e-6):
        yield f"warmup_steps is {steps} in the configuration; the learning rate of step 0 is {rates[0]:g} already"


# Know every optimizer that a program creates, so that a run ends when all of them have stepped.

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


# Know the schedules of learning rates that a program makes, and run them ahead of the program.

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
