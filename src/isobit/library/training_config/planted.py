"""Planted wrong acceptances of a training configuration, each with the promise that must catch it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from isobit.guards.training_config import (
    RULES,
    Rule,
    TrainingConfig,
    accepts,
    achievable_steps,
    total_tokens,
)
from isobit.library.training_config.claims import Subject


@dataclass(frozen=True)
class Planted:
    """A wrong subject, and the promise that must catch it."""

    subject: Subject
    caught_by: str


def accepts_everything(**counts: int) -> bool:
    """Accept everything."""
    return True


def refuses_everything(**counts: int) -> bool:
    """Reject everything, which keeps every promise but usefulness."""
    return False


def counts_started_steps(**counts: int) -> bool:
    """Round the steps of an epoch up."""
    c = TrainingConfig(**counts)
    return c.sequences >= 1 and accepts(
        replace(c, sequences=c.sequences + c.batch_size * c.accumulation - 1)
    )


def carries_the_rest(**counts: int) -> bool:
    """Carry the rest of an epoch into the next."""
    c = TrainingConfig(**counts)
    return (
        c.sequences >= 1
        and c.epochs >= 1
        and accepts(replace(c, sequences=c.sequences * c.epochs, epochs=1))
    )


def forgets_accumulation(**counts: int) -> bool:
    """Count every micro-batch as a step."""
    c = TrainingConfig(**counts)
    return c.accumulation >= 1 and accepts(replace(c, accumulation=1))


def ignores_warmup(**counts: int) -> bool:
    """Ignore the warm-up."""
    return accepts(replace(TrainingConfig(**counts), warmup_steps=0))


def lets_warmup_be_negative(**counts: int) -> bool:
    """Count a negative warm-up as none."""
    c = TrainingConfig(**counts)
    return accepts(replace(c, warmup_steps=max(c.warmup_steps, 0)))


def warms_up_over_all_epochs(**counts: int) -> bool:
    """Compare the warm-up with the steps that the epochs have, not with max_steps."""
    wrong: dict[str, Rule] = {
        "warmup-completes": lambda c: c.warmup_steps < achievable_steps(c),
        "warmup-short": lambda c: 10 * c.warmup_steps <= achievable_steps(c),
        "peak-reached": lambda c: c.warmup_steps < achievable_steps(c),
    }
    return _accepts_by(RULES | wrong, TrainingConfig(**counts))


def is_one_step_short(**counts: int) -> bool:
    """Allow one step fewer than max_steps."""
    wrong: dict[str, Rule] = {"reachable": lambda c: achievable_steps(c) + 1 >= c.max_steps}
    return _accepts_by(RULES | wrong, TrainingConfig(**counts))


def wants_a_token_a_parameter(**counts: int) -> bool:
    """Require one token per parameter instead of ten."""
    wrong: dict[str, Rule] = {"tokens": lambda c: total_tokens(c) >= c.parameters}
    return _accepts_by(RULES | wrong, TrainingConfig(**counts))


def wants_more_than_ten(**counts: int) -> bool:
    """Reject exactly ten tokens per parameter."""
    wrong: dict[str, Rule] = {"tokens": lambda c: total_tokens(c) > 10 * c.parameters}
    return _accepts_by(RULES | wrong, TrainingConfig(**counts))


def wants_exact_epochs(**counts: int) -> bool:
    """Reject epochs that have more than max_steps steps."""
    wrong: dict[str, Rule] = {"reachable": lambda c: achievable_steps(c) == c.max_steps}
    return _accepts_by(RULES | wrong, TrainingConfig(**counts))


def _accepts_by(rules: dict[str, Rule], config: TrainingConfig) -> bool:
    return all(rule(config) for rule in rules.values())


PLANTED: dict[str, Planted] = {
    planted.subject.__name__: planted
    for planted in (
        Planted(accepts_everything, "refuses_empty_counts"),
        Planted(refuses_everything, "refuses_nothing_good"),
        Planted(counts_started_steps, "has_the_sequences"),
        Planted(carries_the_rest, "reaches_max_steps"),
        Planted(forgets_accumulation, "reaches_max_steps"),
        Planted(ignores_warmup, "peak_is_reached"),
        Planted(lets_warmup_be_negative, "warmup_completes"),
        Planted(warms_up_over_all_epochs, "warmup_is_short"),
        Planted(is_one_step_short, "reaches_max_steps"),
        Planted(wants_a_token_a_parameter, "tokens_suffice"),
        Planted(wants_more_than_ten, "refuses_nothing_good"),
        Planted(wants_exact_epochs, "more_epochs_do_no_harm"),
    )
}
