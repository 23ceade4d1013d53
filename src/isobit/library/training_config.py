"""What accepting a training configuration promises, for all integers, independent of the rules that decide it.

A promise takes a `subject`, which accepts or rejects eight counts, and those counts by name. `TrainingConfig` is
used for its field names alone. Promises are proved by isobit.contracts.judge.proofs.integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from random import Random

from isobit.guards.training_config import (
    RULES,
    Rule,
    TrainingConfig,
    accepts,
    achievable_steps,
    total_tokens,
)

Subject = Callable[..., bool]
Promise = Callable[..., bool]

# Zero and negative counts too: they must be rejected.
ALL_INTEGERS: dict[str, tuple[int | None, int | None]] = {
    f.name: (None, None) for f in fields(TrainingConfig)
}


def is_positive(c: TrainingConfig) -> bool:
    """Return whether every count but the warm-up is positive."""
    return (
        c.sequences > 0
        and c.batch_size > 0
        and c.accumulation > 0
        and c.epochs > 0
        and c.max_steps > 0
        and c.sequence_length > 0
        and c.parameters > 0
    )


def refuses_empty_counts(subject: Subject, **counts: int) -> bool:
    """Accepted counts are positive."""
    c = TrainingConfig(**counts)
    if not subject(**counts):
        return True
    return is_positive(c)


def has_the_sequences(subject: Subject, **counts: int) -> bool:
    """Accepted: all epochs together have the sequences of max_steps steps. Necessary, without division."""
    c = TrainingConfig(**counts)
    return (
        not subject(**counts)
        or c.max_steps * c.batch_size * c.accumulation <= c.epochs * c.sequences
    )


def reaches_max_steps(subject: Subject, **counts: int) -> bool:
    """Accepted: whole steps of every epoch add up to max_steps. Exact."""
    c = TrainingConfig(**counts)
    step = c.accumulation * c.batch_size
    return not subject(**counts) or (step > 0 and c.max_steps <= c.epochs * (c.sequences // step))


def warmup_completes(subject: Subject, **counts: int) -> bool:
    """Accepted: the warm-up ends before the run."""
    c = TrainingConfig(**counts)
    return not subject(**counts) or 0 <= c.warmup_steps < c.max_steps


def warmup_is_short(subject: Subject, **counts: int) -> bool:
    """Accepted: nine steps in ten come after the warm-up."""
    c = TrainingConfig(**counts)
    return not subject(**counts) or 9 * c.max_steps <= 10 * (c.max_steps - c.warmup_steps)


def peak_is_reached(subject: Subject, **counts: int) -> bool:
    """Accepted: the ramp min(t, warmup_steps) is complete before the last step."""
    c = TrainingConfig(**counts)
    return not subject(**counts) or min(c.max_steps - 1, c.warmup_steps) == c.warmup_steps


def tokens_suffice(subject: Subject, **counts: int) -> bool:
    """Accepted: max_steps steps have at least ten tokens per parameter."""
    c = TrainingConfig(**counts)
    tokens = c.max_steps * c.batch_size * c.accumulation * c.sequence_length
    return not subject(**counts) or 10 * c.parameters <= tokens


def refuses_nothing_good(subject: Subject, **counts: int) -> bool:
    """A run that satisfies all promises is accepted: the rules are not stricter."""
    c = TrainingConfig(**counts)
    if not (is_positive(c) and c.warmup_steps >= 0):
        return True
    step = c.batch_size * c.accumulation
    # In sequences rather than in steps: the rest of an epoch is dropped.
    used = c.epochs * (c.sequences - c.sequences % step)
    good = (
        c.max_steps * step <= used
        and 10 * c.warmup_steps <= c.max_steps
        and 10 * c.parameters <= c.max_steps * step * c.sequence_length
    )
    return not good or subject(**counts)


def more_epochs_do_no_harm(subject: Subject, **counts: int) -> bool:
    """Accepted counts are also accepted with one more epoch."""
    return not subject(**counts) or subject(**(counts | {"epochs": counts["epochs"] + 1}))


PROMISES: dict[str, Promise] = {
    promise.__name__: promise
    for promise in (
        refuses_empty_counts,
        has_the_sequences,
        reaches_max_steps,
        warmup_completes,
        warmup_is_short,
        peak_is_reached,
        tokens_suffice,
        refuses_nothing_good,
        more_epochs_do_no_harm,
    )
}

# A run that ended after 43 of its 5000 steps, the learning rate never near its peak.
ENDED_EARLY = TrainingConfig(
    sequences=22_079,
    batch_size=4,
    accumulation=128,
    epochs=1,
    max_steps=5_000,
    warmup_steps=2_000,
    sequence_length=1_024,
    parameters=370_000_000,
)
# Enough epochs, a short warm-up, and as many parameters as 5000 × 4 × 128 × 1024 tokens suffice for.
MENDED = TrainingConfig(
    sequences=22_079,
    batch_size=4,
    accumulation=128,
    epochs=117,
    max_steps=5_000,
    warmup_steps=500,
    sequence_length=1_024,
    parameters=262_144_000,
)


def needs_117_epochs(subject: Subject, epochs: int) -> bool:
    """FALSIFY-CFG-001: 22,079 sequences give 43 steps per epoch, so 5000 steps need 117 epochs."""
    if subject(**(vars(MENDED) | {"epochs": epochs})):
        return epochs >= 117
    return epochs < 117


def needs_a_short_warmup(subject: Subject, warmup_steps: int) -> bool:
    """FALSIFY-CFG-002: with the same sequences a warm-up of at most 500 of 5000 steps is accepted."""
    if subject(**(vars(MENDED) | {"warmup_steps": warmup_steps})):
        return 0 <= warmup_steps <= 500
    return warmup_steps < 0 or warmup_steps > 500


def never_trains_in_one_epoch(subject: Subject, warmup_steps: int) -> bool:
    """The run that ended early is rejected for every warm-up."""
    return not subject(**(vars(ENDED_EARLY) | {"warmup_steps": warmup_steps}))


def draw_near_the_edge(random: Random) -> dict[str, int]:
    """Draw counts close to the limit of acceptance, where promises about accepted counts are tested."""
    batch_size, accumulation, length = (2 ** random.randrange(11) for _ in range(3))
    steps, max_steps = random.randrange(1, 10**5), random.randrange(1, 10**6)
    epochs = -(-max_steps // steps) + random.choice((-1, 0, 0, 1))
    tokens = max_steps * batch_size * accumulation * length
    return {
        "sequences": steps * batch_size * accumulation
        + random.choice((-1, 0, random.randrange(100))),
        "batch_size": batch_size,
        "accumulation": accumulation,
        "epochs": epochs,
        "max_steps": max_steps,
        "warmup_steps": random.choice((0, max_steps // 10, max_steps // 10 + 1, -1, max_steps)),
        "sequence_length": length,
        "parameters": random.choice((tokens // 10, tokens // 10 + 1, 1, 0)),
    }


# Planted wrong acceptances of a training configuration, each with the promise that must catch it.


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
