"""`isobit.audit`."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from isobit import __version__
from isobit.auditing.auditor import AuditOptions, AxisAudit, Progress
from isobit.auditing.axes.axes import AXES_BY_NAME, NotApplicableError, Variation
from isobit.auditing.axes.axes import batch as batch_axis
from isobit.auditing.axes.compiled_axis import CompiledAudit
from isobit.auditing.axes.data_parallel_axis import data_parallel
from isobit.auditing.axes.outcomes import Backward
from isobit.auditing.axes.tensor_parallel_axis import tensor_parallel
from isobit.auditing.compiled_code import check_eager
from isobit.auditing.judging.blame import BY
from isobit.auditing.records import AXES, DEFAULT_AXES, WITHOUT_BACKWARD, Audit, AxisReport, Skipped
from isobit.auditing.replay.model_state import check_initialized, left_as_it_was
from isobit.auditing.report.json import audit_as_json
from isobit.auditing.report.page import write_audit_page
from isobit.auditing.report.sarif import audit_as_sarif
from isobit.auditing.report.text import describe_audit
from isobit.auditing.subjects import Batch, Inputs, as_inputs
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.machine import fingerprint
from isobit.foundation.processor import cpu_name
from isobit.foundation.records import Provenance
from isobit.order.plan import VERSION
from isobit.report.markup import writer_of

# `Report`: what `isobit.audit` returns. It can be printed and saved.

WRITERS = {
    ".html": write_audit_page,
    ".json": audit_as_json,
    ".sarif": audit_as_sarif,
    ".txt": describe_audit,
}


@dataclass(frozen=True)
class Report(Audit):
    """What an audit found, as `isobit.audit` returns it.

    Attributes:
        guilty: operators that give other bits for the same inputs, the largest share of its axis's effect first.
        unjudged: operators without a verdict, each with the reason.
        complete: True if on every axis the run with all guilty operators substituted is the variant, bit for bit.
        effect: how far results differ, by axis.
        kept: True if operators were judged on every axis, none is guilty, and the list is complete.
        axes: one record per axis, with counts and times.

    Example:
        >>> import torch, isobit
        >>> layer = isobit.nn.Linear(16, 4)
        >>> report = isobit.audit(layer, torch.randn(3, 5, 16), vary=("batch",))
        >>> report.kept, report.guilty, report.axes[0].judged
        (True, (), 1)
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file; its suffix decides the form: .html, .json, .sarif or .txt.

        Args:
            path: The file to write; one that exists is replaced.

        Raises:
            ArgumentError: If the suffix is another one.

        Example:
            >>> import tempfile, torch, isobit
            >>> report = isobit.audit(isobit.nn.Linear(8, 4), torch.randn(2, 8), vary=("repeat",))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.save(f"{folder}/audit.html")
        """
        files.write_text(Path(path), writer_of(path, WRITERS)(self))

    def __str__(self) -> str:
        return describe_audit(self)


def origin_of(command: str, judged: str) -> Provenance:
    """Return the provenance of an audit that Python code asked for."""
    machine = fingerprint(VERSION)
    return Provenance(
        isobit=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cpu=cpu_name(),
        engine=f"{machine.capability}, {machine.threads} threads",
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        digest=judged,
    )


CACHED = "a cached call has no backward pass; audit it without backward"


def audit(
    model: nn.Module,
    batch: Batch,
    vary: Sequence[str] | None = None,
    *,
    backward: bool = False,
    sample: int = 0,
    effect: str | None = None,
    blame: str = "auto",
    orders: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Find the operators that make a model's results depend on the batch, and rank them by their effect.

    While the model runs, each operator is called again on the rows of one sample, as it would be if that sample ran
    alone (or without padding, or through a cache …), and the bits of both results are compared. Then the results are
    substituted one operator after another, which shows what each does to the log-probabilities. No second run has to
    be aligned with the first, and the model needs no change.

    Args:
        model: Any module, on any device. It is run about as often as operators are guilty.
        batch: What the model is called with: a tensor, a dict of keywords, or a tuple. Samples are along the first
            dimension, tokens along the second. Padding is what `attention_mask` excludes. `labels` of a model of
            transformers are left out, unless `effect` is "loss".
        vary: The axes: batch, padding, packing, decode, chunks, threads, repeat, compile, tp (tensor-parallel ranks),
            dp (data-parallel ranks, with `backward`). By default batch, padding, decode and repeat; with `backward`
            without decode, which has no backward pass.
        backward: Audit gradients, too: every backward operator, and parameters' gradients summed over samples.
        sample: The sample that runs alone.
        effect: What the effect is measured on: "logp", "loss", "grad", or the name of an output. By default
            log-probabilities of the tokens if the model returns logits, with `backward` the gradients.
        blame: "one" measures each guilty operator, "class" and "layer" measure groups, "bisect" only those that
            change anything; "auto" chooses one or class by their number.
        orders: For how many of the guilty operators the order of addition is revealed in both shapes.
        progress: Called with (stage, done, total).

    Returns:
        A `Report`.

    Raises:
        ArgumentError: An axis, `blame`, `effect` or `sample` is not known, or the batch has no tensor.

    Example:
        >>> import torch, isobit
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), isobit.nn.Linear(3, 4))
        >>> report = isobit.audit(model, torch.randn(4, 8, 3), vary=("batch",))
        >>> [(one.place.operator, one.place.module, one.kind) for one in report.guilty]
        [('aten::native_batch_norm', '0', 'error')]
        >>> report.complete
        True
    """
    check_initialized(model)
    inputs = as_inputs(model, batch, effect)
    vary, left_out = axes_for(backward) if vary is None else (vary, ())
    check(inputs, vary, blame, sample)
    if effect == "grad" and not backward:
        raise ArgumentError(
            expected="backward=True, to measure the effect on gradients",
            received="effect='grad' without it",
            remedy="pass backward=True, or leave effect out",
        )
    options = AuditOptions(effect, blame, progress, backward, orders)
    reports: list[AxisReport] = []
    skipped: list[Skipped] = []
    with torch.no_grad(), left_as_it_was(model):
        for axis in dict.fromkeys(vary):
            try:
                reports.append(audit_axis(axis, inputs, sample, options))
            except NotApplicableError as error:
                skipped.append(Skipped(axis, str(error)))
    command = f"isobit.audit(model, batch, vary={tuple(vary)!r}, backward={backward})"
    made = Report(type(model).__name__, str(inputs), tuple(reports), tuple(skipped), backward)
    return replace(made, provenance=origin_of(command, ""), left_out=left_out)


def axes_for(backward: bool) -> tuple[tuple[str, ...], tuple[Skipped, ...]]:
    """Return the axes that are audited by default, and those that are left out of them."""
    out = WITHOUT_BACKWARD if backward else ()
    left = tuple(Skipped(axis, CACHED) for axis in DEFAULT_AXES if axis in out)
    return tuple(axis for axis in DEFAULT_AXES if axis not in out), left


def check(inputs: Inputs, vary: Sequence[str], blame: str, sample: int) -> None:
    """Raise ArgumentError for an unknown axis, way of blaming, or sample."""
    if isinstance(vary, str) or not vary or any(axis not in AXES for axis in vary):
        raise ArgumentError(
            expected=f"axes among {', '.join(AXES)}, at least one",
            received=repr(vary),
            remedy="leave vary out for the usual ones",
        )
    if blame not in ("auto", *BY):
        raise ArgumentError(
            expected=f"blame: one of auto, {', '.join(BY)}", received=blame, remedy="leave it out"
        )
    if not 0 <= sample < inputs.samples:
        raise ArgumentError(
            expected=f"a sample from 0 to {inputs.samples - 1}",
            received=str(sample),
            remedy="count the samples of the batch from 0",
        )


def audit_axis(axis: str, inputs: Inputs, sample: int, options: AuditOptions) -> AxisReport:
    """Audit one axis; raise NotApplicableError if these inputs do not have it."""
    if axis == "compile":
        if options.backward:
            raise NotApplicableError("compiled modules are audited forward; leave backward out")
        check_eager(inputs.model)
        return CompiledAudit(inputs, options).report()
    variation = variation_of(axis, inputs, sample, options)
    report = AxisAudit(inputs.model, variation, options).report()
    return variation.after(report) if variation.after else report


def variation_of(axis: str, inputs: Inputs, sample: int, options: AuditOptions) -> Variation:
    """Return what changes on an axis, with a backward pass if it is asked for."""
    if axis == "dp":
        if not options.backward:
            raise NotApplicableError("ranks differ in their gradients only: audit with backward")
        return data_parallel(inputs, options.effect)
    if axis == "tp":
        if options.backward:
            raise NotApplicableError("tensor parallelism is audited forward; leave backward out")
        return tensor_parallel(inputs)
    if axis not in AXES_BY_NAME:
        raise NotApplicableError(f"isobit.audit cannot vary {axis} in this process")
    if not options.backward:
        return AXES_BY_NAME[axis](inputs, sample)
    if axis in WITHOUT_BACKWARD:
        raise NotApplicableError(CACHED)
    every = axis == "batch"
    made = batch_axis(inputs, sample, every) if every else AXES_BY_NAME[axis](inputs, sample)
    return Backward(inputs.model, options.effect).add_to(made)
