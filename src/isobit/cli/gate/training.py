"""`isobit gate training`: run one training in every layout of ranks and micro-batches, and compare the results."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from isobit.cli.arguments import add_engine, at_least_one, long_dtype
from isobit.cli.progress import Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError
from isobit.foundation.engines import check_engine
from isobit.foundation.files import write_text
from isobit.foundation.records import Provenance
from isobit.gates.training.picture import draw_curves
from isobit.order.plan import VERSION

if TYPE_CHECKING:
    from isobit.gates.training.launcher import Job
    from isobit.gates.training.rank_layout_gate import Outcome, RankLayoutVerdict
    from isobit.gates.training.workload import RankLayout


# Listed here because their own modules load torch; a test compares.
WORKLOADS = ("moe", "small", "tiny", "whole")
DTYPES = ("bfloat16", "float32")
TRANSPORTS = ("simulator", "gloo")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "training",
        description="Train a Qwen3 model, or with --workload moe a Qwen3-MoE, with AdamW and clipping on a global "
        "batch of unequal samples: data-parallel ranks × micro-batches × tensor-parallel ranks, ranks that experts are "
        "split over (ep), ranks that share attention (cp), DDP and FSDP2, in the simulator or as processes under "
        "torchrun. Every layout must give the same loss curve and the same digests of weights, gradients and "
        "optimizer. Exit 0: kept; 1: broken; 2: could not run.",
    )
    parser.add_argument(
        "--workload", default="small", choices=WORKLOADS, help="default: %(default)s"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["float32"],
        type=long_dtype(*DTYPES),
        metavar="fp32|bf16",
        help="default: fp32",
    )
    parser.add_argument(
        "--transport", default="simulator", choices=TRANSPORTS, help="default: %(default)s"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="[ENGINE:]DATAxMICROxTENSOR[xEXPERTS[xCONTEXT]]",
        help="these, instead of the whole grid",
    )
    parser.add_argument(
        "--stock",
        action="store_true",
        help="also run stock PyTorch, in the same layouts but those with cp",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="write outcomes to it, and go on where it stopped"
    )
    parser.add_argument(
        "--jobs", type=at_least_one, default=1, help="processes that train layouts (default: 1)"
    )
    add_engine(parser)
    parser.add_argument("--picture", type=Path, metavar="SVG", help="draw how far losses differ")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON record instead of a table"
    )
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Run all layouts. The exit code is 0 if isobit's results are the same in all of them."""
    from isobit.foundation.machine import fingerprint
    from isobit.gates.training.launcher import Job
    from isobit.gates.training.rank_layout_gate import judge, run_jobs
    from isobit.gates.training.workload import check_layout, find_workload, layout_grid

    check_engine(options.on)
    workload = find_workload(options.workload)
    layouts = (
        [read_layout(text) for text in options.layouts]
        if options.layouts
        else layout_grid(workload)
    )
    for layout in layouts:
        check_layout(layout, workload)
    sides = (False, True) if options.stock else (False,)
    jobs = [
        Job(layout, options.workload, dtype, stock, options.transport)
        for dtype in options.dtype
        for stock in sides
        for layout in layouts
        if not stock or layout.context == 1  # stock has no ranks that share attention
    ]
    with Steps(f"{len(jobs)} layouts", len(jobs), options.quiet) as steps:

        def report(job: Job) -> None:
            steps.done(f"{job.layout.of('stock' if job.stock else 'isobit')} {job.dtype}")

        outcomes = run_jobs(jobs, report, options.keep, options.on, options.jobs)
    verdicts = [
        judge([o for o in outcomes if o.dtype == dtype and o.stock == stock])
        for dtype in options.dtype
        for stock in sides
    ]
    origin = provenance_of(options, [o.curve.digest for o in outcomes])
    if options.picture is not None:
        write_text(options.picture, picture_of(outcomes, origin))
    kept = all(verdict.kept for verdict in verdicts if verdict.side == "isobit")
    if options.json:
        records = [{**asdict(o), "digest": o.curve.digest} for o in outcomes]
        record = {
            "provenance": origin,
            "machine": fingerprint(VERSION),
            "workload": asdict(workload),
            "kept": kept,
        }
        say_json({**record, "verdicts": verdicts, "outcomes": records})
    else:
        show(make_console(140), outcomes, verdicts)
    return 0 if kept else 1


def read_layout(text: str) -> RankLayout:
    """Parse `2x4x1`, `ddp:2x4x1`, or `4x2x1x2x2` with the ranks of experts and of context."""
    from isobit.gates.training.workload import RankLayout

    engine, _, sizes = text.rpartition(":")
    numbers = sizes.split("x")
    if not 3 <= len(numbers) <= 5 or not all(part.isdecimal() for part in numbers):
        raise ArgumentError(
            expected="DATAxMICROxTENSOR, as 2x4x1, or ddp:2x4x1; or DATAxMICROxTENSORxEXPERTSxCONTEXT",
            received=repr(text),
            remedy="name three to five numbers",
        )
    data, micro, tensor, experts, context = [*map(int, numbers), 1, 1][:5]
    return RankLayout(data, micro, tensor, engine or "isobit", experts, context)


def show(console: Console, outcomes: list[Outcome], verdicts: list[RankLayoutVerdict]) -> None:
    """Print a row per layout, then a sentence per verdict."""
    table = Table(
        "layout (data×micro×tensor, ep, cp)",
        "dtype",
        "ranks",
        "last loss",
        "weights",
        "gradients",
        "optimizer",
        "s",
    )
    for outcome in outcomes:
        curve = outcome.curve
        digests = (curve.weights[:10], curve.gradients[:10], curve.optimizer[:10])
        loss = f"{curve.losses[-1]:.9g}"
        table.add_row(
            outcome.name,
            outcome.dtype,
            str(outcome.layout.ranks),
            loss,
            *digests,
            f"{outcome.seconds:.1f}",
        )
    console.print(table)
    for verdict in verdicts:
        console.print(sentence(verdict))


def sentence(verdict: RankLayoutVerdict) -> str:
    """Return one verdict in words, with its counts."""
    found = (
        f"{verdict.side}, {verdict.dtype}: {verdict.layouts} layouts, {verdict.steps} steps: {verdict.curves} loss "
        f"curve(s), digests of weights {verdict.weights}, gradients {verdict.gradients}, optimizer "
        f"{verdict.optimizers}; losses differ by up to {verdict.largest_difference:.3g}"
    )
    if verdict.side == "stock":
        return f"{found}: {'the control shows no difference' if verdict.kept else 'control'}"
    return f"{found}: {'kept' if verdict.kept else 'BROKEN'}"


def picture_of(outcomes: list[Outcome], origin: Provenance) -> str:
    """Draw the loss curves, a panel per dtype."""
    panels: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {}
    for outcome in outcomes:
        side = "stock" if outcome.stock else "isobit"
        panels.setdefault(outcome.dtype, {}).setdefault(side, {})[outcome.name] = (
            outcome.curve.losses
        )
    return draw_curves(
        panels, "How far the loss of each layout differs from one rank's, by step", origin
    )
