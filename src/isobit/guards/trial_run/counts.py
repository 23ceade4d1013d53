"""Compare the counts of a configuration with those found, and put both through the rules of `training_config`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isobit.guards.training_config import TrainingConfig, check_training, steps_per_epoch
from isobit.guards.trial_run.judging import Found, NotJudged

# count -> its names in configurations: our own, transformers', DeepSpeed's, torchtitan's
NAMES: dict[str, tuple[str, ...]] = {
    "global_batch_size": ("global_batch_size", "train_batch_size"),
    "batch_size": (
        "per_device_train_batch_size",
        "train_micro_batch_size_per_gpu",
        "local_batch_size",
        "batch_size",
    ),
    "accumulation": ("gradient_accumulation_steps", "accumulation", "accumulation_steps"),
    "epochs": ("num_train_epochs", "epochs", "num_epochs"),
    "max_steps": ("max_steps", "total_num_steps"),
    "warmup_steps": ("warmup_steps", "warmup_num_steps"),
}
LEFT_OUT = ("tokens",)  # a model that is fine-tuned sees few tokens per parameter
MINOR = ("warmup-short",)


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


def configured_counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of a configuration, also of nested ones; -1, 0 and "auto" are none."""
    found: dict[str, int] = {}
    for key, names in NAMES.items():
        values = [config[name] for name in names if is_count(config.get(name))]
        if values:
            found[key] = int(values[0])
    for inner in config.values():
        if isinstance(inner, Mapping):
            found = configured_counts(inner) | found
    return found


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number above 0."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and 0 < value < math.inf and value == int(value)


def counts_are_as_configured(
    found: Counts, config: Mapping[str, Any], declared: int | None = None
) -> Iterator[Found]:
    """Yield findings where counts differ from the configuration, or break a rule of `check_training`.

    Args:
        found: The counts of the run.
        config: The configuration.
        declared: The rows of a step that the author declares.

    Raises:
        NotJudged: If there is nothing to compare.
    """
    wanted = configured_counts(config)
    if declared is not None:
        wanted["global_batch_size"] = declared
    pairs = [
        ("batch_size", "rows in a micro-batch", found.rows),
        ("accumulation", "micro-batches per step", found.accumulation),
        (
            "global_batch_size",
            f"rows per step (ranks: {found.ranks})",
            found.per_step,
        ),
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
    algebra = as_training_config(found, wanted)
    if algebra is not None:
        judged += 1
        for each in check_training(algebra):
            if each.rule not in LEFT_OUT:
                yield (
                    f"config-{each.rule}",
                    "warning" if each.rule in MINOR else "error",
                    f"{found.ranks} ranks: expected {each.expected}; received {each.received}; {each.remedy}",
                )
    if not judged:
        raise NotJudged("no configuration with batch sizes or steps, or none that the run shows")


def as_training_config(found: Counts, wanted: Mapping[str, int]) -> TrainingConfig | None:
    """Return the run as `check_training` takes it, with the batch of all ranks; None if a count is not known."""
    if not found.per_step or not found.sequences or not found.accumulation:
        return None
    if "epochs" not in wanted:
        return None
    # per_step is rows × accumulation × ranks; the rules need only the product.
    batch = found.per_step // found.accumulation
    counts = TrainingConfig(
        sequences=found.sequences,
        batch_size=batch,
        accumulation=found.accumulation,
        epochs=wanted["epochs"],
        max_steps=wanted.get("max_steps", 1),
        warmup_steps=wanted.get("warmup_steps", 0),
        sequence_length=1,
        parameters=found.parameters,
    )
    if "max_steps" in wanted:
        return counts
    every = max(1, wanted["epochs"] * steps_per_epoch(counts))
    return TrainingConfig(**{**vars(counts), "max_steps": every})
