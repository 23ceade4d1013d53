"""Logs of runs whose loss falls under noise, drawn from a seed, and what the rules find in them.

`python -m tests.guards.noisy_logs` prints the counts of docs/how-to/my-loss-spiked.md.
"""

import sys
from collections import Counter

import numpy as np

from isobit.guards.run_log.curves import Curve, RunLog
from isobit.guards.run_log.rules import judge_log

LENGTHS = ((200, 10), (300, 10), (1000, 10), (60, 100), (300, 100), (3000, 1))  # entries, steps
NOISES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.6)  # on losses that fall to 2 to 2.3
TAILS = ("gauss", "student t, 3 degrees")


def falling(count, every, noise=0.0, tail=TAILS[0], seed=0):
    """Return steps and losses that fall from 8 or 9, most of it in the first 1,000 steps."""
    draw = np.random.default_rng([seed, count, every])
    steps = np.arange(1, count + 1) * every
    drawn = draw.standard_normal(count) if tail == TAILS[0] else draw.standard_t(3, count)
    return steps, 2 + 6 * np.exp(-steps / 300) + 1.5 * (1.0 + steps) ** -0.3 + noise * drawn


def findings(steps, losses):
    """Return what counts against a log with these losses, as (rule, step)."""
    curve = Curve(zip(steps.tolist(), losses.tolist(), strict=True))
    found = judge_log(RunLog("log", "jsonl", {"loss": curve}, len(curve), 0, True)).findings
    return [(one.rule, one.step) for one in found if one.severity != "info"]


def clean_logs_with(tail, seeds):
    """Return how many logs have a finding of each rule, and how many logs there are."""
    found, total = Counter(), 0
    for count, every in LENGTHS:
        for noise in NOISES:
            for seed in range(seeds):
                rules = {rule for rule, _ in findings(*falling(count, every, noise, tail, seed))}
                found.update(rules)
                total += 1
    return found, total


def spikes_found(height, seeds, count=200, every=10, at=120, noise=0.05):
    """Return in how many logs a spike of one entry, `height` standard deviations high, is found."""
    found = 0
    for seed in range(seeds):
        steps, losses = falling(count, every, noise, seed=seed)
        losses[at] += height * noise
        found += ("spike-loss", int(steps[at])) in findings(steps, losses)
    return found


def main(seeds=8):
    for tail in TAILS:
        found, total = clean_logs_with(tail, seeds)
        shown = ", ".join(f"{rule} in {count}" for rule, count in found.items()) or "no finding"
        print(f"{tail}: {total} clean logs: {shown}")
    for height in (8, 10, 12, 15, 20, 40):
        print(
            f"a spike of {height} sigma: found in {spikes_found(height, 5 * seeds)} of {5 * seeds}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
