"""Compare the counts of a configuration with those found, and put both through the rules of `training_config`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isobit.foundation.plain_text import one_line
from isobit.guards.configured_steps import MINOR, Judgement, Plan, judge_plan, plan_of, read_counts
from isobit.guards.trial_run.report import (
    ConfigurationReport,
    Found,
    NotJudged,
    PreflightFinding,
    many,
)

NEAR = 1e-6  # relative; a rate that is the configured one


@dataclass(frozen=True)
class Counts:
    """What the steps of a run consumed.

    Attributes:
        rows: Rows of a micro-batch of one rank; None if they are not one number.
        accumulation: Micro-batches of a step.
        per_step: Rows of a step over all ranks; ranks with the same batch count once.
        sequences: Samples of the dataset that the loader reads; None if it has no length.
        parameters: Elements of the models' parameters.
        ranks: The number of ranks.
    """

    rows: int | None
    accumulation: int | None
    per_step: int | None
    sequences: int | None
    parameters: int
    ranks: int = 1


def counts_are_as_configured(
    found: Counts, config: Mapping[str, Any], declared: int | None = None
) -> Iterator[Found]:
    """Yield findings where batch sizes differ from the configuration.

    Args:
        found: The counts of the run.
        config: The configuration.
        declared: The rows of a step that the author declares.

    Raises:
        NotJudged: If there is nothing to compare.
    """
    wanted = read_counts(config)
    if declared is not None:
        wanted["global_batch_size"] = declared
    pairs = [
        ("batch_size", "rows in a micro-batch", found.rows),
        ("accumulation", "micro-batches per step", found.accumulation),
        ("global_batch_size", f"rows per step (ranks: {found.ranks})", found.per_step),
    ]
    judged = 0
    for key, words, value in pairs:
        if key in wanted and value is not None:
            judged += 1
            if wanted[key] != value:
                yield (
                    "count",
                    "error",
                    f"expected {key} {wanted[key]}; the run has {value} {words}",
                )
    if not judged:
        raise NotJudged("no configuration with batch sizes, or none that the run shows")


def steps_suffice(
    found: Counts,
    config: Mapping[str, Any],
    peak: Callable[[int], tuple[str, float]] | None = None,
) -> Iterator[Found]:
    """Yield findings where the steps of a configuration break a rule of `training_config`, with the run's own counts.

    The rule of tokens is only a note, since a model that is fine-tuned sees few tokens per parameter.

    Args:
        found: The counts of the run.
        config: The configuration; sequences that it names count more than the run's.
        peak: Returns the class and the largest rate of the program's own schedule in a number of steps.

    Raises:
        NotJudged: If the configuration has no steps, or a rule about steps lacks a count.
    """
    if not plan_of(config).has_steps:
        raise NotJudged("no configuration with epochs, steps or a warm-up")
    given: dict[str, Any] = {"per_step": found.per_step}
    if plan_of(config).sequences is None:
        given["sequences"] = found.sequences
    if plan_of(config).parameters is None:
        given["parameters"] = found.parameters
    plan = plan_of(config, given)
    judgement = judge_plan(plan)
    on = f"{found.ranks} ranks: " if found.ranks > 1 else ""
    for each in judgement.findings:
        severity = "warning" if each.rule in MINOR else "error"
        yield (
            f"config-{each.rule}",
            "info" if each.rule == "tokens" else severity,
            f"{on}expected {each.expected}; received {each.received}; {each.remedy}",
        )
    is_known = any(each.rule == "peak-reached" for each in judgement.findings)
    if peak is not None and plan.rate and judgement.steps and not is_known:
        yield from check_peak(peak, plan.rate, judgement.steps)
    lacking = {name: why for name, why in judgement.not_judged.items() if name != "tokens"}
    if lacking:
        name, why = next(iter(lacking.items()))
        raise NotJudged(f"{name}: {why}; give --sequences, or epochs and a batch size")


def check_peak(
    peak: Callable[[int], tuple[str, float]], rate: float, steps: int
) -> Iterator[Found]:
    """Yield a finding if the program's own schedule does not reach the configured rate."""
    try:
        kind, largest = peak(steps)
    except NotJudged:
        return  # the rules above have judged the configured schedule
    if largest < rate * (1 - NEAR):
        yield (
            "config-peak-reached",
            "error",
            f"the program's {kind} reaches at most {largest:.3g} in the {steps} steps of the run; the configuration's "
            f"rate is {rate:g}: train for more steps, or shorten the warm-up",
        )


# The judgement of a training configuration, as the report of a preflight without steps. Does not load torch.


def as_report(plan: Plan, judgement: Judgement) -> ConfigurationReport:
    """Return a judgement as a report of a preflight without steps."""
    findings = tuple(
        PreflightFinding(
            f"config-{each.rule}",
            "warning" if each.rule in MINOR else "error",
            f"expected {each.expected}; received {each.received}; {each.remedy}",
        )
        for each in judgement.findings
    )
    made, every = len(judgement.judged), len(judgement.judged) + len(judgement.not_judged)
    words = f"FOUND: {many(len(findings), 'finding')}" if findings else "nothing found"
    length = "" if judgement.steps is None else f"; the run takes {many(judgement.steps, 'step')}"
    missed = ", ".join(judgement.not_judged)
    return ConfigurationReport(
        f"{words} by {made} of {every} rules, with {known_counts(plan)}{length}"
        + (f"; not judged: {missed}" if missed else ""),
        findings,
        tuple(judgement.judged),
        dict(judgement.not_judged),
        counts={name: value for name, value in vars(plan).items() if value},
        run_steps=judgement.steps,
    )


def known_counts(plan: Plan) -> str:
    """Return the counts of a plan in words."""
    names = {
        "sequences": "sequences",
        "per_step": "sequences per step",
        "epochs": "epochs",
        "max_steps": "steps at most",
        "warmup_steps": "steps of warm-up",
        "warmup_ratio": "of the steps as warm-up",
        "sequence_length": "tokens per sequence",
        "parameters": "parameters",
    }
    held = [(getattr(plan, name), words) for name, words in names.items()]
    return one_line(
        ", ".join(
            f"{value:g} {words}" if isinstance(value, float) else f"{value:,} {words}"
            for value, words in held
            if value
        )
    )
