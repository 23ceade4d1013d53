"""Compare the hyperparameters of a configuration with those that reached the optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from isobit.guards.trial_run.counts import configured_counts

# name in an optimizer's groups -> its names in configurations: our own, transformers', DeepSpeed's
NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("lr", "learning_rate"),
    "beta1": ("beta1", "adam_beta1"),
    "beta2": ("beta2", "adam_beta2"),
    "eps": ("eps", "adam_epsilon", "epsilon"),
    "weight_decay": ("weight_decay",),
    "momentum": ("momentum",),
}
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
    return {name: float(value) for name, value in found.items() if value is not None}


def is_near(value: float | None, wanted: float) -> bool:
    """Return whether a value is the configuration's."""
    return value is not None and math.isclose(value, wanted, rel_tol=1e-6)


def check_hyperparameters(
    expected: Mapping[str, float], optimizers: list[torch.optim.Optimizer]
) -> Iterator[str]:
    """Yield a sentence for each value that no parameter group, or not every one, has.

    A group may have a weight decay of 0: biases and norms often do. A value that an optimizer does not have is not
    compared: SGD has no eps. If one optimizer has the value, another may have one of its own, but not its default.

    Args:
        expected: What the configuration says.
        optimizers: Every optimizer of the run.
    """
    reached = {
        name
        for name, wanted in expected.items()
        for optimizer in optimizers
        if all(is_near(values_in(group).get(name), wanted) for group in optimizer.param_groups)
    }
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        defaults = {  # a subclass may pass options on to torch's class, which names them
            name: parameter.default
            for each in reversed(type(optimizer).__mro__)
            if "__init__" in vars(each)
            for name, parameter in inspect.signature(vars(each)["__init__"]).parameters.items()
        }
        known = values_in({k: v for k, v in defaults.items() if is_number(v) or k == "betas"})
        groups = [values_in(group) for group in optimizer.param_groups]
        for name, wanted in expected.items():
            held = [group[name] for group in groups if name in group]
            wrong = [value for value in held if not is_near(value, wanted)]
            if name == "weight_decay" and len(wrong) < len(held):
                wrong = [value for value in wrong if value != 0]
            is_default = bool(wrong) and known.get(name) == wrong[0]
            if wrong and (is_default or name not in reached):
                why = ", whose default that is" if is_default else ""
                yield (
                    f"{name} is {wanted:g} in the configuration and {wrong[0]:g} in {len(wrong)} of {len(held)} "
                    f"groups of {kind}{why}"
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
    steps = configured_counts(config).get("warmup_steps", 0)
    if steps > 1 and peak and rates and rates[0] >= peak * (1 - 1e-6):
        yield f"warmup_steps is {steps} in the configuration; the learning rate of step 0 is {rates[0]:g} already"
