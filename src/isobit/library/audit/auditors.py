"""Wrong auditors that the claims of audit-v1 must catch: each lacks one thing that an audit needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobit.auditing import auditor
from isobit.auditing.axes import axes, outcomes
from isobit.auditing.judging.findings import Comparison
from isobit.auditing.records import ERROR, ORDER, Accuracy, Audit, AxisReport
from isobit.auditing.replay import replay, watching
from isobit.library.audit.subject import Question, audited
from isobit.library.subjects import replaced

Auditor = Callable[..., Audit]


def with_part(home: Any, name: str, wrong: Callable[..., Any]) -> Auditor:
    """Return the audit with one of its parts replaced by `wrong(right)`."""

    def run(x: Tensor, question: Question | None = None) -> Audit:
        with replaced(home, name, wrong(getattr(home, name))):
            return audited(x, question)

    run.__name__ = wrong.__name__.strip("_")
    return run


def _never_replays(right: Any) -> Any:
    """Compare every result with itself."""

    def pairs(*given: Any) -> Iterator[Any]:
        for pair in right(*given):
            yield replace(pair, variant=pair.run)

    return pairs


def _by_allclose(right: Any) -> Any:
    """Count results that are close as equal."""

    def compare(run: Tensor, variant: Tensor) -> Comparison:
        if torch.allclose(run.double(), variant.double(), rtol=1e-3, atol=1e-3, equal_nan=True):
            return Comparison(0, run.numel(), 0, 0.0, None)
        return right(run, variant)  # type: ignore[no-any-return]

    return compare


def _of_the_wrong_rows(right: Any) -> Any:
    """Take the rows of the next sample or token."""
    return lambda kept, *context: right([label + 1 for label in kept], *context)


def _calls_all_order(right: Any) -> Any:
    """Explain every difference by the order of addition."""
    return lambda *_: (ORDER, Accuracy("fp64", 0.5, 0.5))


def _calls_all_error(right: Any) -> Any:
    """Explain every difference by an error."""
    return lambda *_: (ERROR, Accuracy("fp64", 2.0, 0.5))


def _complete_unseen(right: Any) -> Any:
    """Report every list as complete without comparing the substituted run."""
    return lambda *_: []


never_replays = with_part(watching.Watcher, "pairs", _never_replays)
by_allclose = with_part(watching, "compare", _by_allclose)
of_the_wrong_rows = with_part(axes, "Rows", _of_the_wrong_rows)
calls_all_order = with_part(watching, "explain", _calls_all_order)
calls_all_error = with_part(watching, "explain", _calls_all_error)
complete_unseen = with_part(outcomes.Outcomes, "equal", _complete_unseen)


def substitutes_nothing(x: Tensor, question: Question | None = None) -> Audit:
    """Substitute nothing, and report every list as complete."""
    with (
        replaced(auditor, "Substituter", lambda *_: nullcontext()),
        replaced(replay.Replay, "substitute", lambda *_: None),
        replaced(outcomes.Outcomes, "equal", lambda *_: []),
    ):
        return audited(x, question)


def without_the_last_sample(x: Tensor, question: Question | None = None) -> Audit:
    """Audit another sample where the last one is asked for."""
    if question is not None and question.sample == question.samples - 1:
        question = replace(question, sample=0)
    return audited(x, question)


def changed_reports(x: Tensor, question: Question | None, change: Any) -> Audit:
    """Return an audit with every axis's report changed."""
    found = audited(x, question)
    return replace(found, axes=tuple(change(axis) for axis in found.axes))


def silent_about_the_unjudged(x: Tensor, question: Question | None = None) -> Audit:
    """Count every operator without a verdict as innocent, and stop asking."""

    def change(axis: AxisReport) -> AxisReport:
        complete = axis.complete or bool(axis.unjudged)
        return replace(axis, unjudged=(), complete=complete, judged=axis.operators)

    return changed_reports(x, question, change)


def without_a_place(x: Tensor, question: Question | None = None) -> Audit:
    """Name the operator, but not the module that called it."""

    def change(axis: AxisReport) -> AxisReport:
        guilty = [replace(g, place=replace(g.place, module="")) for g in axis.guilty]
        return replace(axis, guilty=tuple(guilty))

    return changed_reports(x, question, change)
