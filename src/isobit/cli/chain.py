"""`isobit chain`: compare a whole model in every layout of one batch, isobit's and stock's, bit for bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from isobit.auditing.subjects import read_samples
from isobit.certifying import executing
from isobit.cli.devices import Device, find_device
from isobit.cli.named_model import load_model
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError, UnsupportedError
from isobit.foundation.machine import fingerprint
from isobit.gates.model.batch_layout_gate import Comparison, GateReport, count_steps, run_gate
from isobit.gates.model.batch_layouts import (
    LENGTHS,
    IsobitScorer,
    Scorer,
    StockScorer,
    draw_samples,
)
from isobit.gates.model.models import MODELS
from isobit.gates.model.sweep import Sweep, run_sweep
from isobit.integrations.transformers.enabling import enabled
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
            "sweep": {
                name: getattr(options, name) for name in ("batch", "pad", "lengths", "seeds")
            },
            "kept": ours.kept,
            "isobit": ours,
            "stock": stock,
        }
        say_json(record)
    else:
        show(make_console(140), options, ours, stock)
    if ours.kept or ours.differs:
        return 0 if ours.kept else 1
    lacking = [f"{row.quantity}, {row.layout}: {row.where}" for row in ours.rows if not row.kept]
    missing = f"{ours.parameters - ours.trained} of {ours.parameters} parameters have no gradient"
    raise ArgumentError(
        expected="numbers that can be compared: finite, and not all zero",
        received=lacking[0] if lacking else missing,
        remedy="load trained or random weights; nothing differs, but zeros and NaN do not show that nothing can",
    )


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
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with Steps(f"loading {options.model}", quiet=options.quiet, every=SELDOM) as steps:
        model, tokenizer = load_model(options.model, dtype, place, options.seed, options.trust)
        options.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        size = vocabulary_of(model)
        samples = [own.to(place) for own in draw_samples(size, options.seed)]
        sweep, draws = find_sweep(options, size, tokenizer, place)
        steps.expect(
            (count_steps(samples, few) + (sweep.steps if sweep else 0))
            * (2 if options.stock else 1)
        )

        def judge(scorer: Scorer) -> GateReport:
            def report(layout: str) -> None:
                steps.done(f"{options.model}, {scorer.name}: {layout}")

            fixed = run_gate(scorer, samples, report, few)
            if sweep is None:
                return fixed
            swept = run_sweep(scorer, draws, sweep, report)
            trained = min(fixed.trained, swept.trained)
            return replace(fixed, trained=trained, rows=(*fixed.rows, *swept.rows))

        with supported(options.model, model), backend_of(options, device):
            ours = judge(IsobitScorer(model))
        return ours, judge(StockScorer(model)) if options.stock else None


def vocabulary_of(model: Any) -> int:
    """Return the number of tokens that a model knows.

    Raises:
        ArgumentError: If it is not a language model of transformers with trainable parameters.
    """
    config: Any = getattr(model, "config", None)
    size = (
        getattr(config.get_text_config(), "vocab_size", 0)
        if hasattr(config, "get_text_config")
        else 0
    )
    if not size or not hasattr(model, "generate"):
        raise ArgumentError(
            expected="a causal language model of transformers",
            received=f"{type(model).__module__}.{type(model).__name__}",
            remedy="isobit audit names the operators of any model that depend on the batch; "
            "docs/how-to/own-model.md builds a model from isobit's operators",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError(
            expected="parameters that require a gradient",
            received="a model whose parameters are all frozen",
            remedy="call model.requires_grad_(True): gradients are compared, too",
        )
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    if other := sorted(kinds - {"float32", "bfloat16"}):
        raise ArgumentError(
            expected="parameters in fp32 or bf16: a step of AdamW in fp16 is not finite",
            received=", ".join(other),
            remedy="--dtype bf16 or --dtype fp32",
        )
    return int(size)


@contextmanager
def supported(name: str, model: Any) -> Iterator[None]:
    """Enable a model for a block; for a model that is not supported, also name the command that takes any model.

    Raises:
        UnsupportedError: What `isobit.enable` does not support, or a stock operator that ran.
    """
    try:
        with enabled(model):
            yield
    except UnsupportedError as error:
        if name in MODELS:
            raise
        how = (
            "package.module:function` (which returns a model and a batch"
            if ":" in name
            else f"{name}`"
        )
        raise UnsupportedError(
            expected=error.expected,
            received=error.received,
            remedy=f"{error.remedy}; `isobit audit {how}{')' * (':' in name)} takes any model, and names the "
            "operators that depend on the batch",
        ) from error


def find_sweep(
    options: argparse.Namespace, size: int, tokenizer: Any, place: torch.device
) -> tuple[Sweep | None, list[list[Tensor]]]:
    """Return what is swept and the samples of each seed, or None if no option asks for a sweep.

    Raises:
        ArgumentError: If the numbers do not fit each other, or a token is not in the vocabulary.
    """
    given = (options.batch, options.pad, options.lengths, options.inputs, options.seeds)
    if all(one is None for one in given):
        return None, []
    if options.inputs is not None and (options.lengths is not None or options.seeds is not None):
        raise ArgumentError(
            expected="--inputs, or random tokens by --lengths and --seeds",
            received="both",
            remedy="leave one of them out",
        )
    read = None if options.inputs is None else read_samples(options.inputs, tokenizer)
    batches = options.batch or Sweep.batches[: len(read) if read is not None else None]
    count = max(max(batches), len(LENGTHS))
    repeated = tuple(islice(cycle(LENGTHS), count))
    lengths = options.lengths or repeated if read is None else tuple(len(own) for own in read)
    if options.batch is None and options.lengths is not None:
        batches = Sweep.batches[: len(lengths)]
    seeds = 1 if options.seeds is None else options.seeds
    sweep = Sweep(batches, options.pad or Sweep.pads, lengths, seeds)
    if read is not None and (highest := max(int(own.max()) for own in read)) >= size:
        raise ArgumentError(
            expected=f"tokens below {size}, the size of the vocabulary",
            received=f"{highest} in {options.inputs}",
            remedy="encode the samples with the tokenizer of this model",
        )
    draws = (
        [read]
        if read is not None
        else [draw_samples(size, options.seed + own, lengths) for own in range(seeds)]
    )
    return sweep, [[own.to(place) for own in draw] for draw in draws]


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
            verdict = "BROKEN" if row.differ else "not judged"
            console.print(f"{verdict}: {row.quantity}, {row.layout}: {row.where}", soft_wrap=True)
    for report in (ours, *([stock] if stock else [])):
        console.print(f"{report.side}: {summary(report)}")
    if stock:
        wrong = sum(row.differ > 0 for row in stock.rows)
        seen = f"{wrong} of {len(stock.rows)} comparisons differ"
        console.print(
            f"control: stock: {seen}" if wrong else "control: stock shows no difference here"
        )
    where = f" on {options.device}" if options.device else ""
    trained = f"{ours.trained} of {ours.parameters} parameters with gradients"
    if ours.frozen:
        trained += f" ({ours.frozen} more are frozen)"
    verdict = "kept" if ours.kept else "BROKEN" if ours.differs else "not judged"
    line = f"{options.model}, {options.dtype}{where}, {trained}: {verdict}"
    console.print(line, soft_wrap=True)  # a path may be long, and a verdict is searched for


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
