"""The algebra of a training run, judged before it starts: epochs, steps, warm-up and tokens, in whole numbers.

A run takes `actual_steps` steps t = 0, 1, …; each consumes batch_size × accumulation sequences, and what is left of
an epoch that fills no step is dropped. The learning rate is peak × t / warmup_steps while t < warmup_steps, and falls
as a cosine from t = warmup_steps on; so it equals its peak at that one step, if the run gets there.

Deciding uses only + - * //, comparisons and min, so that the same code runs on the symbolic integers of a proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from isobit.errors import ArgumentError

# Tokens a parameter should see, and steps a step of warm-up should be followed by.
TOKENS_PER_PARAMETER = 10
STEPS_PER_WARMUP_STEP = 10


@dataclass(frozen=True)
class TrainingConfig:
    """The counts that decide how far a run gets."""

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
    """A rule that a configuration breaks, and the numbers that would mend it."""

    rule: str
    expected: str
    received: str
    remedy: str


Rule = Callable[[TrainingConfig], bool]
Explanation = Callable[[TrainingConfig], Finding]


def sequences_per_step(config: TrainingConfig) -> int:
    """Over all micro-batches."""
    return config.batch_size * config.accumulation


def steps_per_epoch(config: TrainingConfig) -> int:
    """Whole steps only."""
    return config.sequences // sequences_per_step(config)


def achievable_steps(config: TrainingConfig) -> int:
    """As many as the epochs hold."""
    return config.epochs * steps_per_epoch(config)


def actual_steps(config: TrainingConfig) -> int:
    """As many as are taken before the steps or the epochs end."""
    return min(config.max_steps, achievable_steps(config))


def min_epochs(config: TrainingConfig) -> int:
    """The fewest epochs that hold max_steps steps."""
    steps = steps_per_epoch(config)
    if steps < 1:
        raise ArgumentError(
            expected=f"an epoch of at least one step, which is {sequences_per_step(config)} sequences",
            received=f"{config.sequences} sequences",
            remedy="lower batch_size or accumulation, or add sequences",
        )
    return (config.max_steps + steps - 1) // steps


def total_tokens(config: TrainingConfig) -> int:
    """Seen in the whole run, again and again if over several epochs."""
    return actual_steps(config) * sequences_per_step(config) * config.sequence_length


def peak_step(config: TrainingConfig) -> int | None:
    """The step whose learning rate is the peak, or None if the run ends before it."""
    return config.warmup_steps if 0 <= config.warmup_steps < actual_steps(config) else None


def counts_are_positive(config: TrainingConfig) -> bool:
    """Nothing is empty; only the warm-up may be left out."""
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


# In this order: each may rely on those before it, and the first makes every divisor positive.
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
    """Every rule holds."""
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
    """`accepts`, of plain integers."""
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
    """Every rule that is broken; where a count is not positive nothing else means anything, and only that is told."""
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


# Apart from the rules: only plain integers are ever printed.
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
