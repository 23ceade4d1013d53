"""Read the counts of a training configuration, and judge them: steps, epochs, warm-up, peak rate and tokens.

Names are those of transformers' TrainingArguments, DeepSpeed, torchtitan, Lightning and Albor. What a configuration
does not say, such as the number of sequences, is given next to it. The rules are those of `training_config`; each is
judged if its counts are known, and otherwise named with what it lacks. Needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from isobit.errors import ArgumentError
from isobit.guards.training_config import (
    Finding,
    TrainingConfig,
    actual_steps,
    check_training,
    steps_per_epoch,
)

# count -> its names in configurations
NAMES: dict[str, tuple[str, ...]] = {
    "global_batch_size": ("global_batch_size", "train_batch_size"),
    "batch_size": (
        "per_device_train_batch_size",
        "train_micro_batch_size_per_gpu",
        "local_batch_size",
        "micro_batch_size",
        "batch_size",
    ),
    "accumulation": (
        "gradient_accumulation_steps",
        "accumulation",
        "accumulation_steps",
        "gradient_accumulation",
        "grad_accum",
        "grad_accum_steps",
        "accumulate_grad_batches",
    ),
    "epochs": ("num_train_epochs", "epochs", "num_epochs", "max_epochs"),
    "max_steps": ("max_steps", "total_num_steps", "total_steps", "train_steps"),
    "warmup_steps": ("warmup_steps", "warmup_num_steps", "num_warmup_steps", "lr_warmup_steps"),
    "warmup_ratio": ("warmup_ratio", "warmup_fraction"),
    "sequences": (
        "sequences",
        "num_sequences",
        "num_samples",
        "train_samples",
        "num_train_samples",
    ),
    "tokens": ("train_tokens", "num_tokens", "dataset_tokens"),
    "sequence_length": (
        "sequence_length",
        "seq_len",
        "seq_length",
        "max_seq_len",
        "max_seq_length",
        "block_size",
        "context_length",
    ),
    "parameters": ("parameters", "num_parameters", "num_params", "n_params"),
    "ranks": ("world_size", "num_processes", "data_parallel_size"),
}
OF_SECTIONS = {
    ("training", "steps"): "max_steps"
}  # torchtitan's; elsewhere "steps" may be anything
RATES = ("lr", "learning_rate", "peak_lr", "max_lr")
SCHEDULES = ("lr_scheduler_type", "lr_scheduler", "scheduler", "schedule")
OTHER_SECTIONS = re.compile("(eval|valid|test|dev|infer|generat|log|sav|checkpoint)")
LARGEST = 2**63
DEFAULT_EPOCHS = 3  # of transformers, in every dump of its arguments; max_steps overrides it
FRACTIONS = ("warmup_ratio",)
MINOR = ("warmup-short",)  # a warning


@dataclass(frozen=True)
class Plan:
    """What is known of a run; None is not known or not limited.

    Attributes:
        sequences: The number of training sequences.
        per_step: Sequences of a step, over all micro-batches and ranks.
        epochs: The most passes over the data; may be a part of one.
        max_steps: The most steps.
        warmup_steps: Steps over which the learning rate rises.
        warmup_ratio: The same, as a share of all steps that are planned.
        sequence_length: Tokens per sequence.
        parameters: The number of parameters of the model.
        rate: The peak learning rate.
        schedule: The name of the schedule.
    """

    sequences: int | None = None
    per_step: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    sequence_length: int | None = None
    parameters: int | None = None
    rate: float | None = None
    schedule: str = ""

    @property
    def has_steps(self) -> bool:
        """Whether the configuration says how long the run is, or how long its warm-up."""
        return bool(self.epochs or self.max_steps or self.warmup_steps or self.warmup_ratio)


@dataclass(frozen=True)
class Judgement:
    """What the rules say of a plan.

    Attributes:
        findings: Rules that are broken.
        judged: Rules whose counts are known.
        not_judged: Rules whose counts are not, with what is missing.
        steps: The steps that the run takes; None if they are not known.
    """

    findings: tuple[Finding, ...]
    judged: tuple[str, ...]
    not_judged: Mapping[str, str]
    steps: int | None


def read_counts(config: Mapping[str, Any], *, is_strict: bool = False) -> dict[str, int | float]:
    """Return the counts of a configuration, also of nested sections; the outermost value of a count is taken.

    -1, None and "auto" are no value, and neither is 0 of steps and warm-up. Sections for evaluation, logging and
    checkpoints are not read.

    Args:
        config: The configuration.
        is_strict: Whether a value that is no count, and two that differ, are errors; otherwise the one is left out,
            and the first of the other is taken.

    Raises:
        ArgumentError: See `is_strict`.
    """
    found: dict[str, dict[int, list[tuple[str, int | float]]]] = {}
    for depth, path, value in values_in(config):
        count = count_named(path)
        if count is None:
            continue
        number = as_count(count, value)
        if number is None:
            if is_strict and not is_none(value):
                raise ArgumentError(
                    expected=f"{'.'.join(path)} as a number from 1 to 2^63",
                    received=f"{value!r}"[:80],
                    remedy="correct it, or remove it",
                )
            continue
        if count == "warmup_steps" and 0 < number < 1:  # as transformers 5 takes it
            count = "warmup_ratio"
        found.setdefault(count, {}).setdefault(depth, []).append((".".join(path), number))
    counts: dict[str, int | float] = {}
    for count, by_depth in found.items():
        held = by_depth[min(by_depth)]
        if is_strict and len({number for _, number in held}) > 1:
            raise ArgumentError(
                expected=f"one value of {count}",
                received=", ".join(f"{path} = {number}" for path, number in held[:4]),
                remedy="name a configuration with the values of one run",
            )
        counts[count] = held[0][1]
    return counts


def values_in(
    config: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[int, tuple[str, ...], Any]]:
    """Yield every value of a configuration with its depth and path, without sections that are not about training."""
    for name, value in config.items():
        here = (*path, str(name))
        if isinstance(value, Mapping):
            if not OTHER_SECTIONS.match(str(name).lower()):
                yield from values_in(value, here)
        else:
            yield len(path), here, value


def count_named(path: tuple[str, ...]) -> str | None:
    """Return the count that a name stands for."""
    if path[-2:] in OF_SECTIONS:
        return OF_SECTIONS[path[-2:]]  # type: ignore[index]
    return next((count for count, names in NAMES.items() if path[-1] in names), None)


def as_count(count: str, value: Any) -> int | float | None:
    """Return a value as a count; None if it is none. Epochs may have a fraction, and ratios have one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value) if not isinstance(value, int) else value
    except ValueError:
        return None
    if isinstance(number, float) and not math.isfinite(number):
        return None
    if not -LARGEST < number < LARGEST:
        return None
    if count in FRACTIONS:
        return float(number) if 0 < number <= 1 else None
    if number == -1 or (number == 0 and count in ("max_steps", "warmup_steps")):
        return None
    if count in ("epochs", "warmup_steps") and number != int(number):
        return number if number > 0 else None
    return int(number) if number == int(number) else None


def is_none(value: Any) -> bool:
    """Return whether a value says that there is none."""
    return value is None or value in (-1, 0, "auto", "none", "None", "", "-1", "0")


def plan_of(
    config: Mapping[str, Any], given: Mapping[str, Any] | None = None, *, is_strict: bool = False
) -> Plan:
    """Read a configuration as a plan.

    Args:
        config: The configuration.
        given: Counts by their names here, which count more than the configuration's.
        is_strict: See `read_counts`.

    Raises:
        ArgumentError: See `read_counts`.
    """
    counts: dict[str, Any] = {
        **read_counts(config, is_strict=is_strict),
        **{name: value for name, value in (given or {}).items() if value is not None},
    }
    ranks = int(counts.get("ranks", 1))
    length = counts.get("sequence_length")
    sequences, tokens = counts.get("sequences"), counts.get("tokens")
    if sequences is None and tokens is not None and length:
        sequences = tokens // length
    per_step = counts.get("per_step", counts.get("global_batch_size"))
    if per_step is None and "batch_size" in counts:
        per_step = counts["batch_size"] * counts.get("accumulation", 1) * ranks
    epochs = counts.get("epochs")
    if epochs == DEFAULT_EPOCHS and "max_steps" in counts and "num_train_epochs" in config:
        epochs = None
    rates = (value for _, path, value in values_in(config) if path[-1] in RATES)
    return Plan(
        sequences=sequences,
        per_step=per_step,
        epochs=epochs,
        max_steps=counts.get("max_steps"),
        warmup_steps=int(counts.get("warmup_steps", 0)),
        warmup_ratio=float(counts.get("warmup_ratio", 0.0)),
        sequence_length=length,
        parameters=counts.get("parameters"),
        rate=next((rate for rate in map(as_rate, rates) if rate), None),
        schedule=schedule_in(config),
    )


def as_rate(value: Any) -> float | None:
    """Return a value as a learning rate; None if it is none."""
    try:
        rate = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return rate if math.isfinite(rate) and rate > 0 and not isinstance(value, bool) else None


def schedule_in(config: Mapping[str, Any]) -> str:
    """Return the name of the schedule of a configuration, in lower case."""
    for _, path, value in values_in(config):
        is_named = path[-1] in SCHEDULES or (
            path[-1] in ("type", "name", "decay_type") and path[-2:-1] and path[-2] in SCHEDULES
        )
        if is_named and isinstance(value, str):
            return value.lower().removeprefix("schedulertype.")
    return ""


def judge_plan(plan: Plan) -> Judgement:
    """Judge each rule of `training_config` whose counts are known.

    Args:
        plan: What is known of the run.
    """
    known = as_known(plan)
    if known is None:
        needs = "the sequences, the batch size, and epochs or max_steps"
        names = ("steps-per-epoch", "reachable", "warmup-completes", "peak-reached", "tokens")
        return Judgement((), (), dict.fromkeys(names, f"needs {needs}"), None)
    config, has_data = known
    missing: dict[str, str] = {}
    if not has_data and plan.epochs:
        lacks = [
            words
            for words, value in (
                ("the sequences", plan.sequences),
                ("the batch size", plan.per_step),
            )
            if value is None
        ]
        needs = f"needs {' and '.join(lacks)}"
        missing |= dict.fromkeys(("steps-per-epoch", "reachable"), needs)
    if plan.parameters is None or plan.sequence_length is None or plan.per_step is None:
        lacks = [
            words
            for words, value in (
                ("parameters", plan.parameters),
                ("the sequence length", plan.sequence_length),
                ("the batch size", plan.per_step),
            )
            if value is None
        ]
        missing["tokens"] = f"needs {', '.join(lacks)}"
    skipped = {*missing, *(() if plan.epochs and plan.max_steps else ("reachable",))}
    broken = [each for each in check_training(config) if each.rule not in skipped]
    if reaches_peak(plan, config):
        broken = [each for each in broken if each.rule != "peak-reached"]
    found = [with_rates(each, plan, config) if "peak" in each.rule else each for each in broken]
    if (
        not has_data and plan.epochs
    ):  # a warm-up that is too long for max_steps is so for fewer, too
        broken_rules = {each.rule for each in found}
        of_warmup = {"warmup-completes", "warmup-short", "peak-reached"}
        missing |= dict.fromkeys(sorted(of_warmup - broken_rules), missing["reachable"])
    rules = ("positive", "steps-per-epoch", "reachable", "warmup-completes", "warmup-short")
    judged = tuple(rule for rule in (*rules, "peak-reached", "tokens") if rule not in missing)
    is_positive = not any(each.rule == "positive" for each in found)
    is_known = is_positive and "reachable" not in missing
    return Judgement(tuple(found), judged, missing, actual_steps(config) if is_known else None)


def as_known(plan: Plan) -> tuple[TrainingConfig, bool] | None:
    """Return a plan as the rules take it, and whether its data is known; None if its length is not.

    Without epochs, the data is read again and again, until max_steps.
    """
    has_data = plan.sequences is not None and plan.per_step is not None
    if not (plan.max_steps or (plan.epochs is not None and has_data)):
        return None
    config = TrainingConfig(
        sequences=plan.sequences if plan.sequences is not None else 1,
        batch_size=plan.per_step if plan.per_step is not None else 1,
        accumulation=1,
        epochs=1,
        max_steps=plan.max_steps or 1,
        warmup_steps=plan.warmup_steps,
        sequence_length=plan.sequence_length if plan.sequence_length is not None else 1,
        parameters=plan.parameters if plan.parameters is not None else 1,
    )
    if not has_data or plan.epochs is None:  # as much data as the steps read
        config = replace(config, sequences=config.batch_size * config.max_steps)
    elif plan.epochs != int(plan.epochs):
        config = replace(config, sequences=int(config.sequences * plan.epochs))
    else:
        config = replace(config, epochs=int(plan.epochs))
    is_positive = config.batch_size > 0
    if plan.max_steps is None and is_positive:
        config = replace(config, max_steps=max(1, config.epochs * steps_per_epoch(config)))
    if plan.warmup_ratio and not plan.warmup_steps:
        config = replace(config, warmup_steps=math.ceil(plan.warmup_ratio * config.max_steps))
    return config, has_data


def reaches_peak(plan: Plan, config: TrainingConfig) -> bool:
    """Return whether the schedule has its peak within the run; it is largest at its start, or where it ends."""
    steps = actual_steps(config) if config.batch_size > 0 else 0
    at = {0, min(config.warmup_steps, steps - 1), steps - 1} if steps > 0 else set()
    rates = [rate_at(plan.schedule, t, config.warmup_steps, config.max_steps) for t in at]
    return max(rates, default=0.0) >= 1.0


def with_rates(found: Finding, plan: Plan, config: TrainingConfig) -> Finding:
    """Add the largest rate that the schedule reaches within the steps of the run."""
    steps = actual_steps(config)
    if plan.rate is None or steps < 1:
        return found
    last = plan.rate * rate_at(plan.schedule, steps - 1, config.warmup_steps, config.max_steps)
    words = f"{found.received}: the learning rate ends at {last:.3g}, and its peak is {plan.rate:g}"
    return replace(found, received=words)


def rate_at(schedule: str, step: int, warmup: int, total: int) -> float:
    """Return the share of the peak rate in a step, by the formulas of transformers.

    Args:
        schedule: "linear", "cosine", "constant", "constant_with_warmup", "polynomial" or "inverse_sqrt"; any other is
            taken as a cosine.
        step: The step, from 0.
        warmup: Steps of warm-up.
        total: The steps that the schedule is made for.

    Example:
        >>> rate_at("linear", 42, 2000, 5000), rate_at("linear", 2000, 2000, 5000)
        (0.021, 1.0)
    """
    if schedule == "constant":
        return 1.0
    if step < warmup:
        return step / warmup
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "constant_with_warmup":
        return 1.0
    if schedule == "inverse_sqrt":
        scale = max(warmup, 1)
        return math.sqrt(scale / max(step, scale))
    if schedule in ("linear", "polynomial"):
        return 1.0 - share
    return 0.5 * (1.0 + math.cos(math.pi * share))
