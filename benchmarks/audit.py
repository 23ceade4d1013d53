"""Audits of small models of eleven architectures: operators, judged, guilty, complete, and the cost of finding."""

import itertools
import statistics
import time

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import isobit
from benchmarks.audit_models import NAMES, build
from isobit.auditing.records import DEFAULT_AXES
from isobit.foundation.machine import thread_count

FORWARD, BACKWARD = "forward", "forward and backward"
KEPT = {FORWARD: len(NAMES), BACKWARD: 6}  # audits that must be complete
COUNTS = ("operators", "judged", "guilty", "not judged", "still differ", "complete")
TIMES = ("run ms", "find ms", "explain ms", "cost", "cost, least")


def run(quick, threads, dtypes):
    """Print a table per direction and one of all axes; return 1 if too few audits are complete."""
    console = Console(highlight=False, width=170)
    kinds = ["bfloat16"] if quick else dtypes
    repeats = {FORWARD: 3 if quick else 7, BACKWARD: 1 if quick else 3}
    tables = {what: Table(what, "dtype", *COUNTS, *TIMES) for what in KEPT}
    axes, reasons, costs = (
        Table("guilty by axis", "dtype", *DEFAULT_AXES),
        [],
        {what: [] for what in KEPT},
    )
    complete = dict.fromkeys(KEPT, 0)
    with thread_count(threads[-1]), Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("auditing", total=len(NAMES) * len(kinds) * 3)
        for name, dtype in itertools.product(NAMES, kinds):
            short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
            for what, table in tables.items():
                made = build(name, "table", getattr(torch, dtype), labels=what == BACKWARD)
                axis, cells, cost = measure(*made, what == BACKWARD, repeats[what])
                table.add_row(name, short, *cells)
                costs[what].append(cost)
                complete[what] += axis.complete
                reasons += explain(f"{name}, {short}, {what}", axis)
                progress.advance(bar)
            cells, why = every_axis(
                f"{name}, {short}", *build(name, "table", getattr(torch, dtype))
            )
            axes.add_row(name, short, *cells)
            reasons += why
            progress.advance(bar)
    for table in (*tables.values(), axes):
        console.print(table)
    for what, found in costs.items():
        console.print(
            f"{what}, axis batch: {complete[what]} of {len(found)} complete; cost in runs of the model, "
            f"{repeats[what]} audits of each: median {middle(found, 0):.1f}, by least times {middle(found, 1):.1f}"
        )
    for line in reasons:
        console.print(line, soft_wrap=True)
    return int(any(complete[what] < kept * len(kinds) for what, kept in KEPT.items()))


def measure(model, batch, backward, repeats):
    """Return the axis, its cells and its cost; plain runs and audits take turns."""
    plain, seconds = [], []
    time_run(model, batch, backward)  # warms up
    for _ in range(repeats):
        plain += [time_run(model, batch, backward) for _ in range(5)]
        report = isobit.audit(model, batch, vary=("batch",), backward=backward, blame="class")
        seconds.append(report.axes[0].seconds)
    axis = report.axes[0]
    find, why = ([taken[stage] for taken in seconds] for stage in ("find", "explain"))
    # Least times are the least disturbed by other programs, which a shared machine runs at the same time.
    cost = statistics.median(find) / statistics.median(plain), min(find) / min(plain)
    counts = [axis.operators, axis.judged, len(axis.guilty), len(axis.unjudged)]
    left = (
        f"{axis.remaining.differ:,} of {axis.remaining.numbers:,}" if axis.remaining else "unknown"
    )
    cells = [
        *map(str, counts),
        left,
        "yes" if axis.complete else "no",
        *map(show, (plain, find, why)),
    ]
    return axis, [*cells, *(f"{ratio:.1f}" for ratio in cost)], cost


def middle(costs, which):
    """Return the median over models of one of the two costs."""
    return statistics.median(cost[which] for cost in costs)


def time_run(model, batch, backward):
    """Return the seconds of one forward, or forward and backward."""
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        found = model(**batch)
        if backward:
            found["loss"].backward()
    taken = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return taken


def show(seconds):
    """Return the median in ms, and the smallest and the largest if there are several."""
    low, middle, high = (f(seconds) * 1e3 for f in (min, statistics.median, max))
    return f"{middle:.0f} ({low:.0f}–{high:.0f})" if len(seconds) > 1 else f"{middle:.0f}"


def every_axis(name, model, batch):
    """Return for each axis how many operators are guilty, and why some axes have no answer."""
    report = isobit.audit(model, batch, vary=DEFAULT_AXES, blame="class")
    cells, reasons = dict.fromkeys(DEFAULT_AXES, "skipped"), []
    for axis in report.axes:
        cells[axis.axis] = f"{len(axis.guilty)} of {axis.judged}" + ", not complete" * (
            not axis.complete
        )
        reasons += explain(f"{name}, {axis.axis}", axis)
    reasons += [f"{name}, {one.axis}: skipped: {one.reason}" for one in report.skipped]
    return list(cells.values()), reasons


def explain(name, axis):
    """Return a line that says why an axis is not complete."""
    return [] if axis.complete else [f"{name}: not complete: {axis.why_not}"]
