"""Claims of rollout-summary-v1: metrics free of cuts and arrival; planted sums that depend on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally

Part = list[tuple[Any, Any]]  # of one worker: log-probabilities of both sides per sequence
Subject = Callable[[list[Part]], dict[str, float]]
MEANS: dict[str, Callable[[Any, Any], Any]] = {
    "rollout_corr/kl": lambda mine, theirs: mine - theirs,
    "sampling/sampling_logp_difference/mean": lambda mine, theirs: abs(theirs - mine),
}


def sequences_of(case: Case) -> Part:
    """Return sequences of different lengths with the log-probabilities of two sides."""
    x = case.arguments["x"].double().flatten(0, 1)
    mine = (-x[:, 0].abs() - 2.0**-30).numpy()
    theirs = mine + 1e-3 * x[:, 1].numpy() * (1 + np.abs(mine))
    width = mine.shape[1]
    return [(mine[k, : width - k % 3], theirs[k, : width - k % 3]) for k in range(len(mine))]


def numbers(metrics: dict[str, float]) -> torch.Tensor:
    """Return metrics as a tensor, in the order of their names."""
    return torch.tensor([metrics[name] for name in sorted(metrics)], dtype=torch.float64)


def free_of_cuts(subject: Subject, case: Case, tally: Tally) -> None:
    """One worker, several, an empty one, and other orders of arrival give the same bits."""
    tally.count(case.rows)
    known = sequences_of(case)
    whole = numbers(subject([known]))
    order = torch.randperm(len(known), generator=case.generator(8)).tolist()
    shuffled = [known[k] for k in order]
    cuts = {
        "two workers": [known[::2], known[1::2]],
        "seven workers": [known[k::7] for k in range(7)],
        "a worker per sequence, the last first": [[one] for one in reversed(known)],
        "other order of arrival": [shuffled],
        "three workers, one without work": [shuffled[:4], [], shuffled[4:]],
    }
    for name, parts in cuts.items():
        tally.same(numbers(subject(parts)), whole, name)


def rounded_once(subject: Subject, case: Case, tally: Tally) -> None:
    """Means are those of rational numbers, rounded once."""
    tally.count(case.rows)
    known = sequences_of(case)
    found = subject([known[::2], known[1::2]])
    for name, value in MEANS.items():
        terms = [Fraction(float(v)) for mine, theirs in known for v in value(mine, theirs)]
        wanted = torch.tensor(float(sum(terms) / len(terms)), dtype=torch.float64)
        tally.same(torch.tensor(found[name], dtype=torch.float64), wanted, name)


# ---- planted --------------------------------------------------------------------------------------------


def in_order_of_arrival(parts: list[Part]) -> dict[str, float]:
    """Add fp64 numbers in the order of arrival."""
    found = {}
    for name, value in MEANS.items():
        total, count = 0.0, 0
        for part in parts:
            for mine, theirs in part:
                for term in value(mine, theirs).tolist():
                    total, count = total + term, count + 1
        found[name] = total / count
    return found


def mean_of_means(parts: list[Part]) -> dict[str, float]:
    """Average the workers' means, as if all had the same number of tokens."""
    found = {}
    for name, value in MEANS.items():
        each = [math.fsum(v) / len(v) for v in joined(parts, value)]
        found[name] = math.fsum(each) / len(each)
    return found


def without_the_last_worker(parts: list[Part]) -> dict[str, float]:
    """Lose what the last worker sent, if there are several."""
    return exactly(parts[:-1] if len(parts) > 1 else parts)


def halves_rounded(parts: list[Part]) -> dict[str, float]:
    """Sum exactly on each worker, and round before the sums are added."""
    found = {}
    for name, value in MEANS.items():
        each = joined(parts, value)
        found[name] = sum(math.fsum(v) for v in each) / sum(map(len, each))
    return found


def stock(parts: list[Part]) -> dict[str, float]:
    """Take torch's mean of what arrived, as frameworks do."""
    found = {}
    for name, value in MEANS.items():
        terms = np.concatenate(joined(parts, value))
        found[name] = float(torch.from_numpy(terms).mean())
    return found


def exactly(parts: list[Part]) -> dict[str, float]:
    """Return the right means."""
    found = {}
    for name, value in MEANS.items():
        terms = [Fraction(float(v)) for one in joined(parts, value) for v in one]
        found[name] = float(sum(terms) / len(terms))
    return found


def joined(parts: list[Part], value: Any) -> list[Any]:
    """Return the terms of each worker that has any."""
    each = [[value(mine, theirs) for mine, theirs in part] for part in parts if part]
    return [np.concatenate(one) for one in each]
