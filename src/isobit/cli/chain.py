"""`isobit chain`: compare a whole model in every layout of one batch, isobit's and stock's, bit for bit."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from isobit.cli.devices import Device, find_device
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.compiled import executing
from isobit.errors import ArgumentError
from isobit.gates.model.batch_layout_gate import Comparison, GateReport, count_steps, run_gate
from isobit.gates.model.batches import draw_samples
from isobit.gates.model.models import build_model
from isobit.gates.model.scorers import IsobitScorer, Scorer, StockScorer
from isobit.integrations.transformers.enabling import enabled
from isobit.machine import fingerprint
from isobit.order.plan import VERSION

# Models that compiled code, run on a CPU, gets through in minutes.
SMALLEST = ("qwen3-micro", "qwen3-tiny", "qwen2-tiny", "llama-tiny")


def run(options: argparse.Namespace) -> int:
    """Run the gate and print it. The exit code is 0 if isobit's results are the same in all layouts."""
    device = find_device(options.device) if options.device else None
    check_options(options, device)
    ours, stock = go(options, device)
    if options.json:
        record = {
            "provenance": provenance_of(options, [str(row) for row in ours.rows]),
            "machine": fingerprint(VERSION),
            "device": device.facts if device else {"name": "cpu"},
            "model": options.model,
            "dtype": options.dtype,
            "seed": options.seed,
            "kept": ours.kept,
            "isobit": ours,
            "stock": stock,
        }
        say_json(record)
    else:
        show(make_console(140), options, ours, stock)
    return 0 if ours.kept else 1


def check_options(options: argparse.Namespace, device: Device | None) -> None:
    """Choose the model and whether stock runs, where the user did not.

    Raises:
        ArgumentError: If a model would take days on a CPU, or an option has no meaning for the device.
    """
    virtual = device is not None and device.is_virtual
    options.model = options.model or ("qwen3-micro" if virtual else "qwen3-small")
    if options.interpreted and not virtual:
        raise ArgumentError(
            expected="--interpreted with a target, such as --device sm_90",
            received=f"--device {options.device}" if device else "no --device",
            remedy="leave --interpreted out: a card runs compiled code",
        )
    if virtual:
        options.stock = False  # torch's own kernels of a GPU are not here
        if options.model not in SMALLEST:
            raise ArgumentError(
                expected=f"a model of {', '.join(SMALLEST)} where compiled code is run on this CPU",
                received=f"--model {options.model}, which would take days",
                remedy="leave --model out, or use --device cuda",
            )


def backend_of(options: argparse.Namespace, device: Device | None) -> AbstractContextManager[Any]:
    """Return what runs kernels for the length of a block: nothing but torch's device, unless it is virtual."""
    if device is None or not device.is_virtual:
        return nullcontext()
    return executing("interpreter" if options.interpreted else "machine", target=device.target)


def go(options: argparse.Namespace, device: Device | None) -> tuple[GateReport, GateReport | None]:
    """Run isobit's side, and stock's if required, with a progress bar."""
    few = device is not None and device.is_virtual
    place = device.place if device else torch.device("cpu")
    with Steps(f"building {options.model}", quiet=options.quiet, every=SELDOM) as steps:
        model = build_model(options.model, getattr(torch, options.dtype), options.seed).to(place)
        samples = [own.to(place) for own in draw_samples(model.config.vocab_size, options.seed)]
        steps.expect(count_steps(samples, few) * (2 if options.stock else 1))

        def judge(scorer: Scorer) -> GateReport:
            def report(layout: str) -> None:
                steps.done(f"{options.model}, {scorer.name}: {layout}")

            return run_gate(scorer, samples, report, few)

        with enabled(model), backend_of(options, device):
            ours = judge(IsobitScorer(model))
        return ours, judge(StockScorer(model)) if options.stock else None


def show(
    console: Console, options: argparse.Namespace, ours: GateReport, stock: GateReport | None
) -> None:
    """Print a table of rows with their counts, then a summary per side."""
    sides = ["isobit: differ", *(["stock: differ"] if stock else [])]
    table = Table("quantity", "layout = the layout it is compared with", *sides)
    others: tuple[Comparison | None, ...] = stock.rows if stock else (None,) * len(ours.rows)
    for row, other in zip(ours.rows, others, strict=True):
        table.add_row(row.quantity, row.layout, say(row), *([say(other)] if other else []))
    console.print(table)
    for row in ours.rows:
        if not row.kept:
            console.print(f"BROKEN: {row.quantity}, {row.layout}: {row.where}")
    for report in (ours, *([stock] if stock else [])):
        console.print(f"{report.side}: {summary(report)}")
    where = f" on {options.device}" if options.device else ""
    trained = f"{ours.trained} of {ours.parameters} parameters with gradients"
    console.print(
        f"{options.model}, {options.dtype}{where}, {trained}: {'kept' if ours.kept else 'BROKEN'}"
    )


def say(row: Comparison) -> str:
    """Return how many of how many numbers differ."""
    if row.kept:
        return f"0 of {row.numbers:,}"
    share = f"{row.differ:,} of {row.numbers:,} ({row.differ / max(row.numbers, 1):.1%})"
    if row.idle:
        share += f", {row.idle} of {row.tensors} tensors zero or not finite"
    if row.aggregates is not None:
        return f"{share}, max |d| {row.aggregates[0]:.2g}"
    return share if row.tensors == 1 else f"{share}, {row.tensors_differ} of {row.tensors} tensors"


def summary(report: GateReport) -> str:
    """Return the largest differences over all layouts, and the worst share of gradients."""
    found = [row.aggregates for row in report.rows if row.aggregates is not None]
    largest, divergence, clipped = (
        max((a[i] for a in found), default=float("nan"), key=abs) for i in range(3)
    )
    gradients = [row for row in report.rows if row.quantity == "gradient"]
    worst = max(gradients, key=lambda row: row.differ)
    return (
        f"max |Δlogp| {largest:.3g}, mean(e^d−1−d) {divergence:.3g}, clip share {clipped:.3g}; gradients that differ "
        f"{worst.differ:,} of {worst.numbers:,} ({worst.differ / worst.numbers:.1%}), "
        f"in {worst.tensors_differ} of {worst.tensors} tensors"
    )
