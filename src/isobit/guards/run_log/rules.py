"""The rules of a run's log: what is not finite, rises, spikes, exceeds its limit, stands still or is missing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

from isobit.guards.live.drift import RECENT, Reading
from isobit.guards.run_log.alarms import alarms_of
from isobit.guards.run_log.curves import RunLog
from isobit.guards.run_log.findings import Limits, LogFinding, NotJudged, Verdict, name_steps
from isobit.guards.run_log.schedule import follows_schedule

RISE, SPAN = 0.05, 500  # the most that it may rise, over so many steps
FLAT, FLAT_SPAN = 0.001, 2000  # a mean that falls by less than this share over so many steps

SEVERITIES = ("error", "warning", "info")

Rule = Callable[[RunLog, Limits], Iterator[LogFinding]]


def judge_log(log: RunLog, limits: Limits | None = None) -> Verdict:
    """Judge a log by every rule.

    Args:
        log: The log.
        limits: What it is judged by; None for the defaults.

    Returns:
        Findings in the order of their steps.
    """
    found: list[LogFinding] = []
    judged, skipped = [], {}
    for name, rule in RULES.items():
        try:
            found += rule(log, limits or Limits())
            judged.append(name)
        except NotJudged as reason:
            skipped[name] = str(reason)
    found.sort(key=lambda finding: (finding.step, finding.rule))
    return Verdict(tuple(found), tuple(judged), skipped)


def nonfinite(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that every logged number is finite."""
    for name, points in log.curves.items():
        wrong = [step for step, value in points if not math.isfinite(value)]
        if wrong:
            yield LogFinding(
                "nonfinite",
                "error",
                wrong[0],
                f"{name} is not finite in {len(wrong)} of {len(points)} entries, first at step {wrong[0]}",
                claim="stays-finite",
            )


def hidden_nonfinite(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Find losses that stand in for one that was not finite: beside a norm that is not, or exactly 0."""
    losses = dict(log.curves["loss"])
    norms = dict(log.curves.get("grad_norm", ()))
    beside = [
        s
        for s, norm in norms.items()
        if not math.isfinite(norm) and math.isfinite(losses.get(s, math.nan))
    ]
    zeros = [step for step, loss in losses.items() if loss == 0.0]
    cause = (
        "transformers' logging_nan_inf_filter replaces a loss that is not finite; set it to False"
    )
    if beside:
        yield LogFinding(
            "hidden-nonfinite",
            "error",
            beside[0],
            f"the loss is finite and the gradient norm is not, in {len(beside)} of {len(norms)} entries",
            f"{cause}; or an overflow in the backward",
        )
    if zeros and len(zeros) < len(losses) / 2:
        yield LogFinding(
            "hidden-nonfinite",
            "warning",
            zeros[0],
            f"the loss is exactly 0 in {len(zeros)} of {len(losses)} entries",
            f"{cause}; or batches without a label",
        )


def rising_loss(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check FALSIFY-ALBOR-001: after warm-up the exponential mean of the loss rises by at most 5 % over 500 steps."""
    means = log.mean_loss
    if not means or means[-1][0] - means[0][0] < limits.warmup + SPAN:
        span = means[-1][0] - means[0][0] if means else 0
        raise NotJudged(f"the log spans {span} steps, of {limits.warmup} + {SPAN} that are needed")
    if not math.isfinite(means[-1][1]):
        raise NotJudged("the mean of the losses overflows")
    start, first, worst, behind = means[0][0] + limits.warmup, None, 0.0, 0
    for step, mean in means:
        if step - SPAN < start:
            continue
        while behind + 1 < len(means) and means[behind + 1][0] <= step - SPAN:
            behind += 1
        before = means[behind][1]
        rise = (mean - before) / abs(before) if before else 0.0
        if rise > RISE:
            first, worst = step if first is None else first, max(worst, rise)
    if first is not None:
        yield LogFinding(
            "rising-loss",
            "error",
            first,
            f"the exponential mean of the loss is more than {RISE:.0%} above that of {SPAN} steps before, by up to "
            f"{worst:.1%} (FALSIFY-ALBOR-001)",
            claim="loss-falls",
        )


def norm_limit(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check FALSIFY-ALBOR-002: the gradient norm after clipping stays below the limit."""
    norms = log.finite.get("grad_norm", ())
    if not norms and log.norm_like:
        raise NotJudged(
            f"the log has no gradient norm under a known name; if {log.norm_like[0]} is one, pass --columns "
            f"grad_norm={log.norm_like[0]}, and if none is, --columns grad_norm="
        )
    if not norms:
        raise NotJudged("the log has no gradient norm")
    if limits.norms == "unclipped" or (limits.norms == "auto" and log.form == "trainer_state"):
        raise NotJudged("the norms were logged before clipping (--norms clipped if they were not)")
    above = [(step, norm) for step, norm in norms if norm >= limits.max_norm]
    if above:
        yield LogFinding(
            "norm-limit",
            "error",
            above[0][0],
            f"the gradient norm is at least {limits.max_norm:g} in {len(above)} of {len(norms)} entries, at most "
            f"{max(norm for _, norm in above):.4g} (FALSIFY-ALBOR-002)",
            claim="norms-are-bounded",
        )


def spikes(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Find where the loss, or the logarithm of the norm, leaves its course; see isobit.guards.live.drift."""
    for name in ("loss", "grad_norm"):
        points = log.finite.get(name, ())
        if name == "loss" and len(points) <= 64:
            raise NotJudged(f"{len(points)} losses, of more than 64 that are needed")
        values = [value for _, value in points]
        found: dict[str, list[tuple[int, float, Reading]]] = {}
        for at, reading in alarms_of(values, log=name == "grad_norm"):
            found.setdefault(reading.status, []).append((points[at][0], values[at], reading))
        for status, alarms in found.items():
            if is_reported(log, f"{status}-{name}", [step for step, _, _ in alarms]):
                continue  # by the run's own watch, which may name the module
            step, value, reading = alarms[0]
            against = (
                f"the median of the last {RECENT} entries is {reading.score:.6g}"
                if status == "divergence"
                else f"score {reading.score:.1f} against the last 128 entries"
            )
            steps = tuple(step for step, _, _ in alarms)
            yield LogFinding(
                f"{status}-{name}",
                reading.severity,
                step,
                f"{name} is {value:.6g}, {against}{name_steps(steps)}",
                "a bad batch or a change of data; a learning rate that is too high; for Adam, a beta2 that is too "
                "large for gradients that change",
                steps=steps,
            )


def is_reported(log: RunLog, rule: str, steps: list[int]) -> bool:
    """Return whether the run's own watch reported these alarms of a curve."""
    name = rule.replace("grad_norm", "grad.norm")
    return {step for step, found, _, _ in log.reported if found == name} >= set(steps)


def plateau(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that the loss still falls at the end of the log."""
    means = log.mean_loss
    last = means[-1][0] if means else 0
    if means and not math.isfinite(means[-1][1]):
        raise NotJudged("the mean of the losses overflows")
    at = bisect_right(means, last - FLAT_SPAN, key=lambda point: point[0]) - 1
    if at < 0 or means[at][0] < limits.warmup:
        raise NotJudged(f"the log has no {FLAT_SPAN} steps after warm-up")
    before = means[at][1]
    if before - means[-1][1] < FLAT * abs(before):
        yield LogFinding(
            "plateau",
            "info",
            last - FLAT_SPAN,
            f"the exponential mean of the loss fell by less than {FLAT:.1%} in the last {FLAT_SPAN} steps",
            "the run has converged; a learning rate of almost zero; parameters that are not in the optimizer",
        )


def missing_steps(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that steps rise by one interval: none is missing."""
    if not log.numbered:
        raise NotJudged("entries have no step")
    steps = [step for step, _ in log.curves["loss"]]
    gaps = Counter(b - a for a, b in pairwise(steps) if b > a)
    if not gaps:
        raise NotJudged("the log has one entry")
    usual = gaps.most_common(1)[0][0]
    holes = [(a, b) for a, b in pairwise(steps) if b - a > usual]
    # The first and the last entry of many loggers are off the interval.
    inner = [(a, b) for a, b in holes if a != steps[0] and b != steps[-1]]
    if inner:
        lost = sum((b - a) // usual - 1 or 1 for a, b in inner)
        yield LogFinding(
            "missing-steps",
            "warning",
            inner[0][0],
            f"no entry between steps {inner[0][0]} and {inner[0][1]}, where every {usual} is usual; {lost} entries "
            f"are missing in {len(inner)} places",
            "a crash between log and checkpoint; a filter of the logger; a file of several runs",
        )


def repeated_steps(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that no step is logged twice."""
    if not log.numbered:
        raise NotJudged("entries have no step")
    backs = log.resumed
    if backs:
        yield LogFinding(
            "repeated-steps",
            "warning",
            backs[0][1],
            f"step {backs[0][1]} follows step {backs[0][0]}; steps go back in {len(backs)} places. Of entries "
            f"that were logged again the later ones are judged, and {log.replaced:,} earlier ones are not",
            "the run was resumed from an earlier checkpoint; several runs or ranks write one file",
        )


def readable(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that every entry can be read. The last of a run that was killed, or still writes, may be cut."""
    if log.unreadable:
        yield LogFinding(
            "unreadable",
            "warning",
            log.unread_after,
            f"{log.unreadable:,} of {log.rows:,} entries cannot be read, the first after step {log.unread_after}; "
            "what they have is not judged",
            "several processes write one file; a disk that was full; text of another program in the log",
        )
    if log.cut:
        where = "" if log.cut == 1 else f" of {log.cut} files"
        yield LogFinding(
            "cut-off",
            "info",
            log.curves["loss"][-1][0],
            f"the last entry{where} is not whole, and is not judged",
            "the run was killed, or still writes",
        )


def reported(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Pass on what the run's own watch reported."""
    if log.form != "events" and not log.reported:
        raise NotJudged("the log is not one of isobit.guards.watch")
    found: dict[str, list[tuple[int, str, str]]] = {}
    for step, rule, message, severity in log.reported:
        found.setdefault(rule, []).append((step, message, severity))
    for rule, events in found.items():
        step, message, _ = events[0]
        steps = tuple(dict.fromkeys(step for step, _, _ in events))
        worst = min((severity for _, _, severity in events), key=SEVERITIES.index)
        yield LogFinding(
            f"watch: {rule}",
            worst,
            step,
            f"{message}{name_steps(steps)}",
            "see docs/how-to/watch-a-run.md",
            steps=steps,
        )


RULES: dict[str, Rule] = {
    "nonfinite": nonfinite,
    "hidden-nonfinite": hidden_nonfinite,
    "rising-loss": rising_loss,
    "norm-limit": norm_limit,
    "spikes": spikes,
    "plateau": plateau,
    "missing-steps": missing_steps,
    "repeated-steps": repeated_steps,
    "readable": readable,
    "schedule": follows_schedule,
    "reported": reported,
}
