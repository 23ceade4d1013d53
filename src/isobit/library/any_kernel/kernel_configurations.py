"""Configurations of an autotuned kernel: `isobit check` compares their bits, as the autotuner chooses by time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from isobit.certifying.running.user_kernels import FAULTS, ResourcesError, Running
from isobit.contracts.judge.bound import find_subject
from isobit.contracts.judge.recipes import Case, fixed_recipes
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Contract
from isobit.contracts.options import Options
from isobit.errors import in_one_line
from isobit.foundation.records import ClaimRecord
from isobit.library.any_kernel.kernel_call import operator_of
from isobit.library.any_kernel.within import Operator


def judge_configurations(
    whole: Contract,
    options: Options,
    machine: Running,
    limit: int,
    progress: Callable[[str, int, int], None],
) -> tuple[ClaimRecord, str]:
    """Judge that each configuration has the bits of the first one that runs, and is accurate.

    The first `limit` configurations of each kernel are run, one kernel at a time, on one case per dtype.

    Returns:
        The record, and how many configurations were judged.
    """
    began, before = time.monotonic(), dict(machine.choices.chosen)
    kind, subject = operator_of(whole, options), find_subject(whole, options)
    cases = cases_of(whole)
    wanted = [dict(before)] + [
        {**before, name: text}
        for name, texts in machine.choices.seen.items()
        for text in texts[: max(limit, 1)]
        if text != before.get(name, texts[0])
    ]
    expected: list[torch.Tensor] = []
    tally, skipped = Tally(), 0
    try:
        for number, chosen in enumerate(wanted):
            changed = [f"{n} {t}" for n, t in chosen.items() if before.get(n) != t]
            progress(f"configurations, {', '.join(changed) or 'the first'}", number, len(wanted))
            machine.choices.chosen = chosen
            try:
                found = outputs(kind, subject, cases, tally)
            except ResourcesError:
                skipped += 1
                continue
            except FAULTS as error:
                tally.fail(f"{', '.join(changed)}: {in_one_line(error)}")
                continue
            for one, other in zip(found, expected, strict=bool(expected)):
                tally.same(one, other, f"{', '.join(changed)}, and the first configuration")
            expected = expected or found
    finally:
        machine.choices.chosen = before
    total = sum(len(texts) for texts in machine.choices.seen.values())
    record = ClaimRecord("configurations", "invariant", "kept", 2, 2, **tally.counts())
    words = f"{len(wanted) - skipped} of {total} configurations compared"
    if skipped:
        words += f", {skipped} more need too much of {machine.target}"
    if len(wanted) < total:
        words += f"; for all: --configurations {total}, or isobit certify"
    if tally.differing:
        remedy = "the autotuner chooses by time, so a result depends on the run; isobit certify names the order of each"
        record = replace(record, verdict="broken", level=1, at=2, detail=f"{tally.first}; {remedy}")
    return replace(record, seconds=round(time.monotonic() - began, 3)), words


def cases_of(whole: Contract) -> list[Case]:
    """Return the last small case of each dtype."""
    name, inputs = next(iter(whole.inputs.items()))
    return [
        Case(list(fixed_recipes(name, replace(inputs, dtypes=(dtype,))))[-1], inputs)
        for dtype in inputs.dtypes
    ]


def outputs(
    kind: type[Operator], subject: Callable[..., torch.Tensor], cases: list[Case], tally: Tally
) -> list[torch.Tensor]:
    """Return what the kernel returns for each case, and judge its accuracy."""
    found = []
    with torch.no_grad():
        for case in cases:
            kept: list[torch.Tensor] = []

            def noted(*given: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
                kept.append(subject(*given).clone())
                return kept[-1]

            kind.forward(noted, case, tally)
            found += kept
    return found
