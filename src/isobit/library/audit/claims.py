"""Claims of audit-v1: planted operators are named, order is told from error, lists are complete, clean is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isobit.auditing import auditor
from isobit.auditing.api import audit
from isobit.auditing.axes import axes, outcomes
from isobit.auditing.judging.findings import Comparison
from isobit.auditing.records import ERROR, ORDER, Accuracy, Audit, AxisReport
from isobit.auditing.replay import replay, watching
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.audit.clean import MODELS, CleanModel
from isobit.library.audit.plants import PLANTS
from isobit.library.audit.plants.plant import Dense, Inputs, Plant, hidden
from isobit.library.claims import on_one_thread, replaced

# Models that depend on the batch without a call to name: no audit may call them invariant.
#
# Rows are moved between samples, or Python decides by the batch, or results leave torch and come back. An audit may
# name an operator, or say that the substituted run is not the variant; it may not be silent.

Call = Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]


def rolled(x: Tensor) -> Tensor:
    """Add the sample before."""
    return x + x.roll(1, 0)


def swapped(x: Tensor) -> Tensor:
    """Return samples in the opposite order."""
    return x.flip(0)


def branched(x: Tensor) -> Tensor:
    """Scale by another factor where there are other samples."""
    return x * 1.5 if len(x) > 1 else x * 1.25


def by_a_number(x: Tensor) -> Tensor:
    """Scale by a number of Python that was read from all samples."""
    return x * float(x.abs().max())


def through_numpy(x: Tensor) -> Tensor:
    """Sort all samples together outside torch."""
    values = x.detach().cpu().numpy().copy()
    values.sort(axis=0)
    return torch.from_numpy(values).to(x.device)


def counted(x: Tensor) -> Tensor:
    """Scale by the number of samples."""
    return x * torch.full((), 1.0 / len(x), device=x.device)


def beside_rolled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a result that is right, and beside it one that mixes samples."""
    return x, x + x.roll(1, 0)


def beside_choices(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a result that is right, and beside it whole numbers that depend on all samples."""
    return x, (x > x.abs().mean()).long()


class Trap(nn.Module):
    """A clean layer, a function that depends on the batch, and a clean layer."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.first, self.last, self.call = Dense(seed=70), Dense(seed=71), call
        self.eval()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        found = self.call(self.first(x))
        main, beside = found if isinstance(found, tuple) else (found, None)
        y: Tensor = self.last(main)
        return y if beside is None else (y, beside)


TRAPS: tuple[Call, ...] = (
    rolled,
    swapped,
    branched,
    by_a_number,
    through_numpy,
    counted,
    beside_rolled,
    beside_choices,
)


# The subject of audit-v1: an audit of one model on one axis.


@dataclass(frozen=True)
class Question:
    """What an audit is asked: of which model, on which axis, for which sample.

    Attributes:
        model: builds the model.
        inputs: draws its inputs; samples are along axis 0.
        axis: the axis.
        sample: the sample that is compared.
        backward: whether gradients are audited.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    axis: str
    sample: int = 0
    backward: bool = False

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(next(iter(self.inputs().values())))


def of_plant(plant: Plant) -> Question:
    """Return the question whose answer is the plant."""
    return Question(
        lambda: plant.make(True), plant.inputs, plant.axis, plant.sample, plant.backward
    )


def audited(x: Tensor, question: Question | None = None) -> Audit:
    """Audit a model; its hidden states are `x` where they have that shape.

    Args:
        x: Hidden states [samples, tokens, width].
        question: What is asked; by default about the first plant.
    """
    question = question or of_plant(PLANTS[0])
    inputs = question.inputs()
    if "x" in inputs and inputs["x"].shape == x.shape:
        inputs["x"] = x.to(inputs["x"].dtype)
    return audit(
        question.model(),
        inputs,
        vary=(question.axis,),
        sample=question.sample,
        backward=question.backward,
    )


Subject = Callable[[Tensor, Question], Audit]


@on_one_thread
def names_the_operator(subject: Subject, case: Case, tally: Tally) -> None:
    """Of every planted model exactly the planted operator is named, with its module, axis and direction."""
    for plant, report in plants(subject, case, tally):
        found = [
            (g.place.operator, g.place.module, g.axis, g.place.backward) for g in report.guilty
        ]
        wanted = (plant.operator, plant.module, plant.axis, plant.backward)
        if found != [wanted]:
            tally.fail(f"{plant.name}: found {found[:3]}, not {wanted}")


@on_one_thread
def tells_order_from_error(subject: Subject, case: Case, tally: Tally) -> None:
    """The kind of every planted operator is right: another order, an error, or chance."""
    for plant, report in plants(subject, case, tally):
        kinds = [g.kind for g in report.guilty if g.place.operator == plant.operator]
        if kinds != [plant.kind]:
            tally.fail(f"{plant.name}: {kinds}, not {plant.kind}")


@on_one_thread
def is_complete(subject: Subject, case: Case, tally: Tally) -> None:
    """With the planted operator's result substituted, the run is the variant, bit for bit; and it says so."""
    for plant, report in plants(subject, case, tally):
        (axis,) = report.axes
        if not report.complete or not nothing_remains(axis):
            remains = axis.remaining.differ if axis.remaining else "unknown"
            tally.fail(f"{plant.name}: complete {report.complete}, {remains} numbers differ")
        elif axis.effect is None:
            tally.fail(f"{plant.name}: no effect was measured")


def nothing_remains(axis: AxisReport) -> bool:
    """Return whether an axis's report shows that nothing remains."""
    return axis.remaining is not None and axis.remaining.numbers > 0 and not axis.remaining.differ


@on_one_thread
def is_silent_on_clean_models(subject: Subject, case: Case, tally: Tally) -> None:
    """No operator of a clean model is named, on any axis; operators were judged, and the list is complete."""
    for clean in MODELS:
        for axis, backward in axes_of(clean):
            if tally.differing:
                return
            model, inputs = clean.build()
            asked = Question(lambda m=model: m, lambda i=inputs: dict(i), axis, 0, backward)  # type: ignore[misc]
            report = ask(subject, case, tally, asked)
            if not report.kept:
                named = [str(g.place) for g in report.guilty]
                why = [a.why_not for a in report.axes] + [s.reason for s in report.skipped]
                where = f"{clean.name}, {axis}{', backward' if backward else ''}"
                tally.fail(f"{where}: guilty {named[:3]}, {why}")


def axes_of(clean: CleanModel) -> Iterator[tuple[str, bool]]:
    """Yield the axes of a clean model, forward and, on the batch axis, backward."""
    for axis in clean.axes:
        yield axis, False
    if clean.backward:
        yield "batch", True


@on_one_thread
def is_never_silent(subject: Subject, case: Case, tally: Tally) -> None:
    """A model that depends on the batch is never reported as invariant: neither planted nor where nothing is called."""
    for trap in TRAPS:
        if tally.differing:
            return
        asked = Question(partial(Trap, trap), hidden, "batch")
        report = ask(subject, case, tally, asked)
        if report.kept or report.exit_code == 0:
            tally.fail(f"{trap.__name__}: reported as invariant")
        elif report.complete and not report.guilty:
            tally.fail(f"{trap.__name__}: reported as complete with nothing named")
    for plant, report in plants(subject, case, tally):
        if report.kept or report.exit_code == 0:
            tally.fail(f"{plant.name}: reported as invariant")


def plants(subject: Subject, case: Case, tally: Tally) -> Iterator[tuple[Plant, Audit]]:
    """Audit every planted model until one fails."""
    for plant in PLANTS:
        if tally.differing:
            return
        yield plant, ask(subject, case, tally, of_plant(plant))


def ask(subject: Subject, case: Case, tally: Tally, asked: Question) -> Audit:
    """Audit a model and count what was judged."""
    tally.count(case.rows)
    report = subject(case.arguments["x"], asked)
    tally.compared += sum(axis.judged for axis in report.axes)
    return report


# Wrong auditors that the claims of audit-v1 must catch: each lacks one thing that an audit needs.

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
