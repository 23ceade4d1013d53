"""Claims of audit-v1: planted operators are named, order is told from error, lists are complete, clean is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from isobit.auditing.records import Audit, AxisReport
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.audit.clean import MODELS, CleanModel
from isobit.library.audit.plants import PLANTS
from isobit.library.audit.plants.plant import Plant, hidden
from isobit.library.audit.subject import Question, of_plant
from isobit.library.audit.traps import TRAPS, Trap
from isobit.library.subjects import on_one_thread

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
