"""An audit of Qwen3-0.6B's architecture in bf16 on the four samples of the batch-layout gate."""

import time
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table

import isobit
from isobit.auditing.records import DEFAULT_AXES
from isobit.foundation.machine import thread_count
from isobit.gates.model.batch_layouts import draw_samples, padded
from isobit.gates.model.models import build_model


def run(quick, threads, dtypes):
    """Print the guilty operators of each axis by class; return 1 if an axis is not complete."""
    console = Console(highlight=False, width=170)
    model = build_model("qwen3-tiny" if quick else "qwen3-0.6b", torch.bfloat16)
    laid_out = padded(draw_samples(model.config.vocab_size), "right")
    batch = {
        "input_ids": laid_out.ids,
        "attention_mask": laid_out.mask,
        "position_ids": laid_out.positions,
    }
    with thread_count(threads[-1]):
        started = time.perf_counter()
        report = isobit.audit(model, batch, vary=DEFAULT_AXES, blame="class")
        taken = time.perf_counter() - started
    table = Table(
        "axis",
        "class of operators",
        "guilty",
        "share of the effect",
        "log-probabilities",
        "largest",
    )
    for axis in report.axes:
        guilty = Counter(found.place.family for found in axis.guilty)
        for group in sorted(axis.groups, key=lambda group: -(group.share or 0.0)):
            share = "" if group.share is None else f"{group.share:.1%}"
            effect = group.effect
            differ = f"{effect.differ} of {effect.numbers}" if effect else ""
            largest = f"{effect.largest:.1e}" if effect else ""
            table.add_row(axis.axis, group.name, str(group.members), share, differ, largest)
        assert sum(guilty.values()) == len(axis.guilty)
    console.print(table)
    for axis in report.axes:
        describe(console, axis)
    for skipped in report.skipped:
        console.print(f"{skipped.axis}: skipped, {skipped.reason}")
    console.print(f"whole audit: {taken:.0f} s")
    return int(not report.complete)


def describe(console, axis):
    """Print one line of an axis: counts, effect, the sum of shares, completeness and time."""
    shares = [found.share for found in axis.groups if found.share is not None]
    effect = axis.effect
    whole = (
        f"{effect.differ} of {effect.numbers} differ, largest {effect.largest:.1e}"
        if effect
        else "none"
    )
    seconds = ", ".join(f"{what} {taken:.1f} s" for what, taken in axis.seconds.items())
    console.print(
        f"{axis.axis}: {axis.operators} operators, {axis.judged} judged, {len(axis.guilty)} guilty,"
        f" {len(axis.unjudged)} not judged; effect: {whole}; shares add up to {sum(shares):.3f};"
        f" complete: {'yes' if axis.complete else 'no'}; {seconds}",
        soft_wrap=True,
    )
