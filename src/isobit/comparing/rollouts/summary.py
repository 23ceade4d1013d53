"""Mergeable summaries of log-probabilities: the metrics do not depend on how the data is cut, nor on who arrives first.

[Note: exact summaries]
A metric that is a mean is a sum and a count. The sum of fp64 numbers depends on its order, so two workers that each sum
a half get other last bits than one. Here a sum is an integer, in units of 2^-1074: adding is exact, so any number of
files, workers and any order of arrival give the same integer, and it is rounded once at the end. The contract is
rollout-summary-v1. Maxima and counts have no order anyway. The squares of a standard deviation are rounded to fp64 one
by one before they are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

UNITS = 1074  # a sum is an integer in units of 2^-1074, the smallest fp64
PART = (
    1 << 20
)  # numbers that are added at a time: sums of halves of their mantissas stay below 2^53

Floats = NDArray[np.float64]


@dataclass
class ExactTotal:
    """The exact sum of fp64 numbers.

    Attributes:
        units: the sum of the finite ones in units of 2^-1074.
        nans: how many are NaN.
        infinities: how many are -inf and how many +inf.
    """

    units: int = 0
    nans: int = 0
    infinities: tuple[int, int] = (0, 0)

    def add(self, values: Floats) -> None:
        """Add numbers."""
        for start in range(0, len(values), PART):
            self._add_part(values[start : start + PART])

    def _add_part(self, values: Floats) -> None:
        bits = np.ascontiguousarray(values).view(np.int64)
        exponent = (bits >> 52) & 0x7FF
        special = exponent == 0x7FF
        if special.any():
            odd = values[special]
            low, high = self.infinities
            self.nans += int(np.isnan(odd).sum())
            self.infinities = (
                low + int((odd == -np.inf).sum()),
                high + int((odd == np.inf).sum()),
            )
            bits, exponent = bits[~special], exponent[~special]
        mantissa = bits & ((1 << 52) - 1) | (exponent > 0).astype(np.int64) << 52
        sign = np.where(bits < 0, -1.0, 1.0)
        shift = np.maximum(exponent, 1) - 1
        halves = ((mantissa >> 26) * sign, (mantissa & ((1 << 26) - 1)) * sign)
        upper, lower = (np.bincount(shift, weights=half) for half in halves)
        for at in np.flatnonzero((upper != 0) | (lower != 0)).tolist():
            self.units += ((int(upper[at]) << 26) + int(lower[at])) << at

    def merge(self, other: ExactTotal) -> None:
        """Add what another total has."""
        self.units += other.units
        self.nans += other.nans
        low, high = self.infinities
        self.infinities = (low + other.infinities[0], high + other.infinities[1])

    @property
    def fraction(self) -> Fraction:
        """The sum of the finite numbers, exactly."""
        return Fraction(self.units, 1 << UNITS)

    def over(self, count: int) -> float:
        """Return the sum divided by a count, rounded once."""
        if self.nans or all(self.infinities):
            return math.nan
        if any(self.infinities):
            return math.inf if self.infinities[1] else -math.inf
        return as_float(self.fraction / count)


def as_float(value: Fraction) -> float:
    """Return a fraction rounded to fp64; an infinity beyond its range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def deviation(total: ExactTotal, squares: ExactTotal, count: int) -> float:
    """Return the standard deviation of a sample from its sum and its sum of squares; 0 for one number."""
    if count < 2:
        return 0.0
    if not math.isfinite(total.over(1)) or not math.isfinite(squares.over(1)):
        return math.nan
    variance = (squares.fraction - total.fraction**2 / count) / (count - 1)
    return math.sqrt(as_float(max(variance, Fraction(0))))


SUMS = ("ratio", "apart", "probs", "k3", "error", "weight", "sequences", "probs²", "apart²")


@dataclass
class Summary:
    """What the metrics of a rollout are computed from; two summaries can be merged.

    Attributes:
        tokens: how many log-probabilities were added.
        sequences: of how many sequences that have any.
        clipped: how many importance ratios are further than 0.2 from 1.
        sums: exact sums by name.
        most: the largest of |log ratio|, |difference of probabilities| and ratio, and the smallest ratio.
    """

    tokens: int = 0
    sequences: int = 0
    clipped: int = 0
    sums: dict[str, ExactTotal] = field(
        default_factory=lambda: {name: ExactTotal() for name in SUMS}
    )
    most: dict[str, float] = field(default_factory=dict)

    def add(self, rollout: Floats, trainer: Floats, lengths: list[int]) -> None:
        """Add the log-probabilities of some sequences, one after the other; `lengths` are theirs."""
        if not len(rollout):
            return
        self.tokens += len(rollout)
        self.sequences += sum(length > 0 for length in lengths)
        if np.array_equal(rollout, trainer) and np.isfinite(rollout).all():
            for name in ("weight", "error"):  # both are 1 for each token, and the rest is 0
                self.sums[name].units += len(rollout) << UNITS
            self._most({"apart": 0.0, "probs": 0.0, "weight": 1.0, "least weight": -1.0})
            return
        with np.errstate(all="ignore"):  # what overflows is an infinity, which the totals know
            ratio = trainer - rollout  # log p of the trainer over that of the rollout
            apart, weight = np.abs(ratio), np.exp(ratio)
            probs = np.abs(np.exp(trainer) - np.exp(rollout))
            values = {
                "ratio": ratio,
                "apart": apart,
                "probs": probs,
                "k3": weight - ratio - 1,
                "error": np.exp(apart),
                "weight": weight,
                "sequences": means(apart, lengths),
                "probs²": probs * probs,
                "apart²": apart * apart,
            }
            self.clipped += int((np.abs(weight - 1) > 0.2).sum())
        for name, numbers in values.items():
            self.sums[name].add(numbers)
        self._most({"apart": apart.max(), "probs": probs.max(), "weight": weight.max()})
        self._most({"least weight": -weight.min()})

    def merge(self, other: Summary) -> None:
        """Add what another summary has."""
        self.tokens += other.tokens
        self.sequences += other.sequences
        self.clipped += other.clipped
        for name in SUMS:
            self.sums[name].merge(other.sums[name])
        self._most(other.most)

    def _most(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            both = float(value), self.most.get(name, -math.inf)
            self.most[name] = math.nan if any(map(math.isnan, both)) else max(both)

    def mean(self, name: str) -> float:
        """Return the mean of a quantity over tokens."""
        return self.sums[name].over(self.tokens)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics under the names that RL frameworks log; empty without tokens."""
        if not self.tokens:
            return {}
        mean, most = self.mean("apart"), self.most["apart"]
        k3 = self.mean("k3")
        return {
            "train_rollout_logprob_abs_diff": self.sums["sequences"].over(self.sequences),
            "training/rollout_probs_diff_max": self.most["probs"],
            "training/rollout_probs_diff_mean": self.mean("probs"),
            "training/rollout_probs_diff_std": self.spread("probs"),
            "rollout_corr/kl": 0.0 - self.mean("ratio"),
            "rollout_corr/k3_kl": k3,
            "mismatch_kl": k3,
            "gen_kl_error": k3,
            "token_mult_prob_error": self.mean("error"),
            "sampling/sampling_logp_difference/mean": mean,
            "sampling/sampling_logp_difference/max": most,
            "sampling/importance_sampling_ratio/min": -self.most["least weight"],
            "sampling/importance_sampling_ratio/mean": self.mean("weight"),
            "sampling/importance_sampling_ratio/max": self.most["weight"],
            "logprob_diff/max": most,
            "vllm_vs_local_logprob_diff_mean": mean,
            "vllm_vs_local_logprob_diff_max": most,
            "vllm_vs_local_logprob_diff_std": self.spread("apart"),
            "clip_share_0.2": self.clipped / self.tokens,
        }

    def spread(self, name: str) -> float:
        """Return the standard deviation of a quantity over tokens."""
        return deviation(self.sums[name], self.sums[f"{name}²"], self.tokens)


def means(values: Floats, lengths: list[int]) -> Floats:
    """Return the mean of each sequence, its sum exact and rounded once, so that batches do not matter."""
    ends = np.cumsum(lengths)
    return np.array(
        [
            math.fsum(one) / len(one) if np.isfinite(one).all() else float(np.mean(one))
            for one in (values[e - n : e] for e, n in zip(ends.tolist(), lengths, strict=True) if n)
        ],
        dtype=np.float64,
    )


def summarise(parts: list[list[tuple[Floats, Floats]]]) -> dict[str, float]:
    """Return the metrics of sequences that several workers saw: a list per worker, merged in the order given."""
    whole = Summary()
    for part in parts:
        mine = Summary()
        for rollout, trainer in part:
            a, b = (np.asarray(side, dtype=np.float64) for side in (rollout, trainer))
            mine.add(a, b, [len(rollout)])
        whole.merge(mine)
    return whole.metrics
