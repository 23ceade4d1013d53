"""Check the numbers of a training configuration before the run: epochs, steps, warm-up and tokens.

A run takes `actual_steps` steps t = 0, 1, …; each consumes batch_size × accumulation sequences, and the rest of an
epoch that does not fill a step is dropped. The learning rate is peak × t / warmup_steps while t < warmup_steps, and
falls as a cosine from t = warmup_steps on; so it equals its peak at that one step, if the run gets there.

The rules use only + - * //, comparisons and min, so that a proof can run the same code on symbolic integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from isobit.errors import ArgumentError

TOKENS_PER_PARAMETER = 10  # the least, over the whole run
STEPS_PER_WARMUP_STEP = 10  # the least number of steps of the run per step of warm-up


@dataclass(frozen=True)
class TrainingConfig:
    """The counts that decide how far a run gets.

    Attributes:
        sequences: The number of training sequences.
        batch_size: Sequences per micro-batch.
        accumulation: Micro-batches per step.
        epochs: The most passes over the data.
        max_steps: The most steps.
        warmup_steps: Steps over which the learning rate rises.
        sequence_length: Tokens per sequence.
        parameters: The number of parameters of the model.

    Example:
        >>> from isobit.guards import TrainingConfig
        >>> sizes = {"sequences": 22_079, "batch_size": 4, "accumulation": 128, "epochs": 1}
        >>> sizes |= {"max_steps": 5000, "warmup_steps": 2000, "sequence_length": 1024}
        >>> TrainingConfig(**sizes, parameters=370_000_000).max_steps
        5000
    """

    sequences: int
    batch_size: int
    accumulation: int
    epochs: int
    max_steps: int
    warmup_steps: int
    sequence_length: int
    parameters: int


@dataclass(frozen=True)
class Finding:
    """A rule that a configuration breaks, and the numbers that would fix it."""

    rule: str
    expected: str
    received: str
    remedy: str


Rule = Callable[[TrainingConfig], bool]
Explanation = Callable[[TrainingConfig], Finding]


def sequences_per_step(config: TrainingConfig) -> int:
    """Return the sequences of one step, over all its micro-batches."""
    return config.batch_size * config.accumulation


def steps_per_epoch(config: TrainingConfig) -> int:
    """Return the whole steps of one epoch."""
    return config.sequences // sequences_per_step(config)


def achievable_steps(config: TrainingConfig) -> int:
    """Return the steps of all epochs."""
    return config.epochs * steps_per_epoch(config)


def actual_steps(config: TrainingConfig) -> int:
    """Return the steps that are taken until max_steps or the epochs end the run."""
    return min(config.max_steps, achievable_steps(config))


def min_epochs(config: TrainingConfig) -> int:
    """Return the fewest epochs that have max_steps steps.

    Raises:
        ArgumentError: If an epoch has no whole step.
    """
    steps = steps_per_epoch(config)
    if steps < 1:
        raise ArgumentError(
            expected=f"an epoch of at least one step, which is {sequences_per_step(config)} sequences",
            received=f"{config.sequences} sequences",
            remedy="lower batch_size or accumulation, or add sequences",
        )
    return (config.max_steps + steps - 1) // steps


def total_tokens(config: TrainingConfig) -> int:
    """Return the tokens of the whole run; those of each epoch count again."""
    return actual_steps(config) * sequences_per_step(config) * config.sequence_length


def peak_step(config: TrainingConfig) -> int | None:
    """Return the step with the peak learning rate, or None if the run ends before it."""
    return config.warmup_steps if 0 <= config.warmup_steps < actual_steps(config) else None


def counts_are_positive(config: TrainingConfig) -> bool:
    """Return whether every count is positive; warmup_steps may be 0."""
    return (
        config.sequences >= 1
        and config.batch_size >= 1
        and config.accumulation >= 1
        and config.epochs >= 1
        and config.max_steps >= 1
        and config.warmup_steps >= 0
        and config.sequence_length >= 1
        and config.parameters >= 1
    )


# In this order: a rule may rely on those before it, and the first makes every divisor positive.
RULES: dict[str, Rule] = {
    "positive": counts_are_positive,
    "steps-per-epoch": lambda c: steps_per_epoch(c) >= 1,
    "reachable": lambda c: achievable_steps(c) >= c.max_steps,
    "warmup-completes": lambda c: c.warmup_steps < actual_steps(c),
    "warmup-short": lambda c: STEPS_PER_WARMUP_STEP * c.warmup_steps <= actual_steps(c),
    "peak-reached": lambda c: peak_step(c) is not None,
    "tokens": lambda c: total_tokens(c) >= TOKENS_PER_PARAMETER * c.parameters,
}


def accepts(config: TrainingConfig) -> bool:
    """Return whether a configuration breaks no rule."""
    return all(rule(config) for rule in RULES.values())


def accepts_counts(
    sequences: int,
    batch_size: int,
    accumulation: int,
    epochs: int,
    max_steps: int,
    warmup_steps: int,
    sequence_length: int,
    parameters: int,
) -> bool:
    """Return what `accepts` returns, from plain integers."""
    return accepts(
        TrainingConfig(
            sequences,
            batch_size,
            accumulation,
            epochs,
            max_steps,
            warmup_steps,
            sequence_length,
            parameters,
        )
    )


def check_training(config: TrainingConfig) -> tuple[Finding, ...]:
    """Find the rules that a configuration breaks.

    Args:
        config: The configuration.

    Returns:
        One finding per rule. If a count is not positive, that is the only one, as the others would mean nothing.

    Example:
        >>> from isobit.guards.training_config import TrainingConfig, check_training
        >>> config = TrainingConfig(
        ...     sequences=1000, batch_size=4, accumulation=2, epochs=1, max_steps=500,
        ...     warmup_steps=10, sequence_length=512, parameters=10_000)
        >>> for finding in check_training(config):
        ...     print(finding.rule, "-", finding.remedy)
        reachable - set epochs to at least 4, or max_steps to at most 125
    """
    if not RULES["positive"](config):
        return (_not_positive(config),)
    return tuple(
        EXPLANATIONS[name](config)
        for name, rule in RULES.items()
        if name != "positive" and not rule(config)
    )


def _not_positive(config: TrainingConfig) -> Finding:
    least = {f.name: 0 if f.name == "warmup_steps" else 1 for f in fields(config)}
    wrong = {name: low for name, low in least.items() if getattr(config, name) < low}
    return Finding(
        "positive",
        "every count at least 1, and warmup_steps at least 0",
        ", ".join(f"{name} = {getattr(config, name)}" for name in wrong),
        "; ".join(f"set {name} to at least {low}" for name, low in wrong.items()),
    )


def _no_step(config: TrainingConfig) -> Finding:
    needed = sequences_per_step(config)
    return Finding(
        "steps-per-epoch",
        f"an epoch of at least one step, which is {config.batch_size} × {config.accumulation} = {needed} sequences",
        f"{config.sequences} sequences",
        f"set batch_size × accumulation to at most {config.sequences}, or sequences to at least {needed}",
    )


def _unreachable(config: TrainingConfig) -> Finding:
    steps = steps_per_epoch(config)
    return Finding(
        "reachable",
        f"max_steps = {config.max_steps} within the epochs",
        f"{config.epochs} × {steps} = {achievable_steps(config)} steps",
        f"set epochs to at least {min_epochs(config)}, or max_steps to at most {achievable_steps(config)}"
        if steps >= 1
        else f"set batch_size × accumulation to at most {config.sequences}: no number of epochs suffices",
    )


def _warmup(rule: str, expected: str) -> Explanation:
    def explain(config: TrainingConfig) -> Finding:
        steps, wanted = actual_steps(config), max(STEPS_PER_WARMUP_STEP * config.warmup_steps, 1)
        return Finding(
            rule,
            expected,
            f"warmup_steps = {config.warmup_steps} of {steps} steps",
            f"train for at least {wanted} steps"
            + (
                f", or set warmup_steps to at most {steps // STEPS_PER_WARMUP_STEP}"
                if steps
                else ""
            ),
        )

    return explain


def _few_tokens(config: TrainingConfig) -> Finding:
    per_step, total = sequences_per_step(config) * config.sequence_length, total_tokens(config)
    wanted = TOKENS_PER_PARAMETER * config.parameters
    most = total // TOKENS_PER_PARAMETER
    return Finding(
        "tokens",
        f"{TOKENS_PER_PARAMETER} tokens a parameter, {wanted} in all",
        f"{actual_steps(config)} steps × {per_step} tokens = {total}",
        f"train for at least {(wanted + per_step - 1) // per_step} steps"
        + (f", or set parameters to at most {most}" if most else ""),
    )


# Separate from the rules, which also run on symbolic integers; only plain integers are printed.
EXPLANATIONS: dict[str, Explanation] = {
    "positive": _not_positive,
    "steps-per-epoch": _no_step,
    "reachable": _unreachable,
    "warmup-completes": _warmup("warmup-completes", "a warm-up that ends before the run does"),
    "warmup-short": _warmup(
        "warmup-short", f"at most one step of warm-up in {STEPS_PER_WARMUP_STEP}"
    ),
    "peak-reached": _warmup("peak-reached", "a step whose learning rate is the peak"),
    "tokens": _few_tokens,
}
