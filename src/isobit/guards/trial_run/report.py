"""The findings of a preflight, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class PreflightFinding:
    """A check that a program does not pass.

    Attributes:
        rule: The rule, as in docs/how-to/before-you-rent-the-gpus.md.
        severity: "warning" or "error"; "info" of what is no finding.
        message: What was found.
        step: The first step, if it is known.
        module: The module or parameter concerned.
        ranks: The ranks concerned, if there are several.
        steps: All steps in which it was found.

    Example:
        >>> from isobit.guards import PreflightFinding
        >>> PreflightFinding("same-batch", "warning", "the inputs of 3 steps have the same bits").rule
        'same-batch'
    """

    rule: str
    severity: str
    message: str
    step: int | None = None
    module: str = ""
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    @property
    def in_steps(self) -> str:
        """The steps as text; ranges for several in a row."""
        steps = self.steps or (() if self.step is None else (self.step,))
        runs: list[list[int]] = []
        for step in steps:
            if runs and runs[-1][1] == step - 1:
                runs[-1][1] = step
            else:
                runs.append([step, step])
        return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class PreflightReport:
    """What a preflight found.

    Attributes:
        steps: Optimizer steps that were observed.
        models: Models that the program called.
        parameters: Their parameters.
        findings: What is wrong.
        judged: Checks that were made.
        not_judged: Checks that were not, with the reason.
        dtypes: Calls of modules without submodules, by class and dtype of the output.
        ranks: Simulated ranks; 1 for a program that ran by itself.
        notes: What is not wrong by itself, such as hyperparameters that nobody has named.

    Example:
        >>> from isobit.guards import PreflightReport
        >>> PreflightReport(3, 1, 2, (), ("batches differ",)).is_clean
        True
    """

    steps: int
    models: int
    parameters: int
    findings: tuple[PreflightFinding, ...]
    judged: tuple[str, ...]
    not_judged: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ranks: int = 1
    notes: tuple[PreflightFinding, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def headline(self) -> str:
        """The verdict in one sentence: what was found, by how many checks of what, and which were not made."""
        made, missed, found = len(self.judged), list(self.not_judged), len(self.findings)
        words = f"FOUND: {many(found, 'finding')}" if found else "nothing found"
        if not found and not missed:
            words = "clean"
        counts = [] if self.ranks == 1 else [many(self.ranks, "rank")]
        counts.append(many(self.steps, "step"))
        if self.models:
            counts += [many(self.models, "model"), many(self.parameters, "parameter")]
        sentence = f"{words} by {made} of {made + len(missed)} checks, on {', '.join(counts)}"
        return sentence + (f"; not judged: {', '.join(missed)}" if missed else "")


@dataclass(frozen=True)
class ConfigurationReport:
    """What is wrong with a configuration, of which nothing was run.

    Attributes:
        headline: The verdict in one sentence.
        findings: What is wrong.
        judged: Rules that were judged.
        not_judged: Rules that were not, with the reason.
        notes: None; a report of a run has them.
        dtypes: None, likewise.
        counts: The counts that are known, by name.
        run_steps: The steps of the run, if they are known.
    """

    headline: str
    findings: tuple[PreflightFinding, ...]
    judged: tuple[str, ...]
    not_judged: Mapping[str, str]
    notes: tuple[PreflightFinding, ...] = ()
    dtypes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    run_steps: int | None = None


def many(count: int, noun: str) -> str:
    """Return a number and its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# What a check of a trial run yields, and how it says that it cannot judge.

# rule, severity, message; and the step, if it is known
Found = tuple[str, str, str] | tuple[str, str, str, int]


class NotJudged(Exception):
    """A program that a check cannot judge, with the reason."""


# Merge findings: one per fault, with the steps and ranks in which it shows.

# Each follows from the one before, in the same step.
NOT_FINITE = ("nonfinite-loss", "nonfinite-gradient", "nonfinite-weight")
NO_TARGETS = "no-targets"
WITHOUT_TARGETS = ("zero-gradient", "no-gradient", "not-moved")


def merge_steps(found: Sequence[PreflightFinding]) -> list[PreflightFinding]:
    """Merge the findings of one program: a rule that breaks in several steps is one finding, consequences are none.

    Args:
        found: All findings.
    """
    merged: dict[tuple[object, ...], PreflightFinding] = {}
    steps: dict[tuple[object, ...], list[int]] = {}
    for each in causes_of(found):
        key: tuple[object, ...] = (each.rule, each.severity, each.module, each.message)
        if each.step is not None:
            # Messages have the numbers of their step; one word before a colon is an optimizer's class.
            place = "" if each.rule in NOT_FINITE else each.module
            first, colon, _ = each.message.partition(": ")
            key = (each.rule, each.severity, place, first if colon and first.isalnum() else "")
            steps.setdefault(key, []).append(each.step)
        merged.setdefault(key, each)
    ordered = [
        replace(each, steps=tuple(sorted(set(steps.get(key, ()))))) for key, each in merged.items()
    ]
    return sorted(ordered, key=lambda each: (each.step is None, each.step or 0))


def causes_of(found: Sequence[PreflightFinding]) -> list[PreflightFinding]:
    """Leave out what follows from another finding: numbers that are not finite because others are not."""
    empty = {each.step for each in found if each.rule == NO_TARGETS}
    wrong = {each.step for each in found if each.rule in NOT_FINITE}
    kept: list[PreflightFinding] = [
        each
        for each in found
        if each.rule not in NOT_FINITE and not (empty and each.rule in WITHOUT_TARGETS)
    ]
    is_poisoned = False  # weights that are not finite leave nothing else to be
    for step in sorted(wrong, key=lambda step: -1 if step is None else step):
        here = [each for each in found if each.rule in NOT_FINITE and each.step == step]
        if not is_poisoned and step not in empty:
            first = min(here, key=lambda each: NOT_FINITE.index(each.rule))
            kept.append(first)
        is_poisoned = is_poisoned or any(each.rule == NOT_FINITE[-1] for each in here)
    return kept


def merge_ranks(
    found: Mapping[int, Sequence[PreflightFinding]],
) -> list[PreflightFinding]:
    """Merge the findings of ranks: those that are equal, then those of one rule, which differ in numbers.

    Args:
        found: The findings of each rank.
    """
    found = without_reduced(found)
    merged: dict[tuple[object, ...], tuple[PreflightFinding, list[int]]] = {}
    shared = {
        each: [rank for rank in found if each in found[rank]]
        for every in found.values()
        for each in every
    }
    for rank, every in found.items():
        counts: dict[tuple[str, str, str], int] = {}
        for each in every:
            key: tuple[object, ...] = (each,)
            if len(shared[each]) == 1:
                kind = each.rule, each.severity, each.module
                counts[kind] = counts.get(kind, 0) + 1
                key = (*kind, counts[kind])
            merged.setdefault(key, (each, []))[1].append(rank)
    return [
        replace(
            each,
            ranks=tuple(ranks),
            message=each.message
            if len(ranks) == len(shared[each])
            else f"{each.message} (on rank {ranks[0]}; alike on the others)",
        )
        for each, ranks in merged.values()
    ]


def without_reduced(
    found: Mapping[int, Sequence[PreflightFinding]],
) -> dict[int, list[PreflightFinding]]:
    """Leave out gradients that are not finite because the loss of another rank is not: they are reduced over ranks."""
    sources = [
        each.step
        for every in found.values()
        for each in every
        if each.rule in (NO_TARGETS, NOT_FINITE[0]) and each.step is not None
    ]

    def is_reduced(each: PreflightFinding) -> bool:
        return (
            each.rule in NOT_FINITE[1:]
            and each.step is not None
            and each.step >= min(sources, default=each.step + 1)
        )

    return {rank: [e for e in every if not is_reduced(e)] for rank, every in found.items()}
