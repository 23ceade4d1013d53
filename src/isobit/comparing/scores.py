"""Is one model better than another? A paired test of scores per item, as lm-evaluation-harness writes them; no torch.

[Note: a test that keeps its level] Both models answered the same items, so the difference of an item's two scores is
free of how hard it is. If neither model is better, each difference is as likely to have the other sign. For scores of 0
and 1 the number of items that only the new model solves is then binomial, and the probability is exact (McNemar's exact
test). For other scores, signs are drawn anew: the share of drawings whose sum is at least as far from 0, the given one
included, is a valid probability for every number of drawings. No normal approximation is made, so that at a level of
5 % at most 5 % of comparisons of equal models are called different, for any number of items. Sums are exact
(math.fsum), so that neither the order of items nor of files changes a digit.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError
from isobit.foundation import files

LARGEST_FILE = 1 << 30
DRAWINGS = 1999
# What must be equal for two records to be answers to the same question.
HASHES = ("doc_hash", "prompt_hash", "target_hash")
METRICS = ("acc_norm", "acc", "exact_match", "em", "f1", "score")


@dataclass(frozen=True)
class ScoreReport:
    """What a paired comparison of scores found.

    Attributes:
        metric: The name of the score.
        items: How many items both models answered.
        base: The mean score of the first model.
        new: The mean score of the second model.
        better: On how many items the second model scored more.
        worse: On how many it scored less.
        probability: Of a difference at least as large, in either direction, where neither model is better.
        level: At most this share of comparisons of equal models is called different.
        problems: Why the files cannot be paired; then nothing was tested.
    """

    metric: str
    items: int = 0
    base: float = 0.0
    new: float = 0.0
    better: int = 0
    worse: int = 0
    probability: float = 1.0
    level: float = 0.05
    problems: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> str:
        """One of better, worse, no difference shown, and could not compare."""
        if self.problems or not self.items:
            return "could not compare"
        if self.probability > self.level:
            return "no difference shown"
        return "better" if self.new > self.base else "worse"

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if self.verdict == "could not compare":
            return "could not compare: " + ("; ".join(self.problems) or "no items")
        return (
            f"{self.verdict}: {self.metric} {self.base:.4f} to {self.new:.4f} over {self.items:,} items, "
            f"{self.better:,} better and {self.worse:,} worse, p = {self.probability:.3g} (level {self.level:g})"
        )


def compare_scores(
    base: str | Path | Iterable[Mapping[str, Any]],
    new: str | Path | Iterable[Mapping[str, Any]],
    *,
    metric: str = "",
    level: float = 0.05,
    seed: int = 0,
) -> ScoreReport:
    """Compare the scores of two models item by item, and test whether one is better.

    Args:
        base: A JSONL file of samples of lm-evaluation-harness (`--log_samples`), or its records.
        new: The same of the model that may be better.
        metric: The name of the score; by default the first of acc_norm, acc, exact_match, em, f1 and score that the
            records have.
        level: The largest share of comparisons of equal models that may be called different.
        seed: Of the drawings, where scores are not 0 and 1.

    Returns:
        A `ScoreReport`.

    Raises:
        ArgumentError: A file cannot be read, or a record has no score.

    Example:
        >>> base = [{"doc_id": i, "acc": 0.0} for i in range(20)]
        >>> new = [{"doc_id": i, "acc": float(i < 12)} for i in range(20)]
        >>> isobit.comparing.compare_scores(base, new).verdict
        'better'
    """
    first, second = (read_records(side) for side in (base, new))
    name = metric or next((m for m in METRICS if first and m in first[0]), "")
    if not 0 < level < 1:
        raise ArgumentError(
            expected="a level between 0 and 1", received=f"{level}", remedy="use 0.05"
        )
    left, right = (by_item(records, name) for records in (first, second))
    problems = problems_of(left, right)
    if problems:
        return ScoreReport(name, level=level, problems=tuple(problems))
    keys = sorted(left)
    pairs = [(left[key][1], right[key][1]) for key in keys]
    differences = [b - a for a, b in pairs]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    binary = all(score in (0.0, 1.0) for pair in pairs for score in pair)
    p = binomial(better, worse) if binary else signs(differences, seed)
    means = [math.fsum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1)]
    return ScoreReport(name, len(pairs), means[0], means[1], better, worse, p, level)


def binomial(better: int, worse: int) -> float:
    """Return the probability of a split at least as uneven of better + worse fair coins, from exact integers."""
    count = better + worse
    tail = sum(math.comb(count, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**count) if count else 1.0


def signs(differences: list[float], seed: int) -> float:
    """Return the share of random signs whose sum is at least as far from 0 as the given one, which is counted too."""
    known = [d for d in differences if d]
    limit = abs(math.fsum(known))
    draw = random.Random(seed)
    far = 1
    for _ in range(DRAWINGS):
        bits = draw.getrandbits(len(known)) if known else 0
        total = math.fsum(d if bits >> i & 1 else -d for i, d in enumerate(known))
        far += abs(total) >= limit
    return far / (DRAWINGS + 1)


def read_records(side: str | Path | Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of a JSONL file, or those given."""
    if not isinstance(side, str | Path):
        return list(side)
    try:
        text = files.read_bytes(Path(side), LARGEST_FILE).decode()
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ArgumentError(
            expected="a JSONL file of samples, as lm_eval --log_samples writes it",
            received=f"{side}: {error}",
            remedy="pass samples_<task>_<time>.jsonl",
        ) from None
    if not all(isinstance(record, dict) for record in found):
        raise ArgumentError(
            expected="one JSON object per line",
            received=f"{side}, which has other lines",
            remedy="pass samples_<task>_<time>.jsonl",
        )
    return found


def by_item(
    records: list[Mapping[str, Any]], metric: str
) -> dict[str, tuple[Mapping[str, Any], float]]:
    """Return {task, item and filter: (record, score)}."""
    found: dict[str, tuple[Mapping[str, Any], float]] = {}
    for record in records:
        score = record.get(metric)
        if not isinstance(score, int | float | bool) or not math.isfinite(score):
            known = [name for name in METRICS if name in record]
            raise ArgumentError(
                expected=f"a finite score {metric or 'of a known name'} in every record",
                received=f"item {record.get('doc_id')!r}, which has {known or 'none'}",
                remedy="pass metric= (--metric) with the name of the score",
            )
        key = json.dumps([str(record.get(part, "")) for part in ("task", "doc_id", "filter")])
        if key in found:
            raise ArgumentError(
                expected="each item once",
                received=f"item {key} twice",
                remedy="pass the samples of one run and one task",
            )
        found[key] = record, float(score)
    return found


def problems_of(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Return why two sets of items cannot be paired."""
    found = []
    for one, other, side in ((left, right, "second"), (right, left, "first")):
        missing = [key for key in one if key not in other]
        if missing:
            found.append(
                f"{len(missing):,} items are not in the {side} file, the first is {missing[0]}"
            )
    for key in sorted(left.keys() & right.keys()):
        for name in HASHES:
            a, b = (side[key][0].get(name) for side in (left, right))
            if a != b:
                return [
                    *found,
                    f"item {key} has another {name}: the models were asked other things",
                ]
    if not left or not right:
        found.append("a file has no items")
    return found
