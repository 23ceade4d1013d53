"""The axis `dp`: one worker with the whole batch against ranks that have a part of it and all-reduce gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from isobit.auditing.axes import collectives
from isobit.auditing.axes.axes import NotApplicableError, VariantCall, Variation, same_start
from isobit.auditing.axes.outcomes import GRADIENT, Backward, gradient_quantity
from isobit.auditing.inputs import Inputs
from isobit.auditing.judging.effects import measure, outputs_of
from isobit.auditing.labels.labels import Rows
from isobit.auditing.records import AxisReport, Guilty
from isobit.integrations.transformers.state import find_state

RANKS = 2


def data_parallel(inputs: Inputs, effect: str | None = None) -> Variation:
    """Compare one worker with two data-parallel ranks, and the all-reduce of more ranks with isobit's tree.

    Every rank runs its samples; gradients are sums over samples, which ranks add by an all-reduce in the simulator.
    A model of isobit's operators adds them by `isobit.parallel.Gradients`, so that no stock collective takes part.

    Args:
        inputs: The whole batch.
        effect: What the effect is measured on; see `isobit.audit`.

    Raises:
        NotApplicableError: Two ranks cannot have equal parts of the samples.
    """
    possible = collectives.ranks_that_divide(inputs.samples)
    if not possible:
        raise NotApplicableError(
            f"{inputs.samples} samples cannot be divided over {RANKS} ranks; pass an even number"
        )
    backward = Backward(inputs.model, effect)
    made = backward.add_to(over_ranks(inputs, RANKS))
    if is_isobits(inputs.model):
        return made

    def after(report: AxisReport) -> AxisReport:
        ranks = possible[-1]
        variation = made if ranks == RANKS else backward.add_to(over_ranks(inputs, ranks))
        return collectives.add_to_report(report, [judge_all_reduce(variation)])

    return replace(made, after=after)


def over_ranks(inputs: Inputs, ranks: int) -> Variation:
    """Return the variation whose calls are the ranks, each with consecutive samples."""
    count = inputs.samples
    size = count // ranks
    calls = []
    for start in range(0, count, size):
        part = samples_of(inputs, start, start + size)
        calls.append(VariantCall(Rows(range(start, start + size)), part.run, part.tokens))
    return Variation(
        "dp",
        f"{ranks} data-parallel ranks have {size} of {count} samples each and all-reduce gradients",
        ("one worker", f"{ranks} ranks"),
        inputs.run,
        tuple(calls),
        inputs.marked(0, torch.arange(count)),
        mixes=True,
        merge=collectives.all_reduce,
    )


def is_isobits(model: nn.Module) -> bool:
    """Return whether isobit reduces the gradients: the model is enabled, or all its parameters are in isobit.nn."""
    owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    ours = all(type(owner).__module__.startswith("isobit.") for owner in owners)
    return ours or find_state(model) is not None


def samples_of(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Return consecutive samples, in memory of their own."""
    count = inputs.samples
    return inputs.map(lambda t: t[start:stop].clone() if t.dim() and len(t) == count else t)


def judge_all_reduce(variation: Variation) -> Guilty | None:
    """Compare the all-reduce of the ranks' gradients with isobit's tree."""
    outputs = []
    for call in variation.calls:
        with same_start():
            outputs.append(outputs_of(call.run()))
    by_rank = collectives.by_rank_of(outputs, GRADIENT)
    found = collectives.judge("dp", "", by_rank)
    if found is None:
        return None
    names = [name for name in outputs[0] if name.startswith(GRADIENT)]
    folded = dict(zip(names, collectives.all_reduce_many(by_rank), strict=True))
    parts = zip(*by_rank, strict=True)
    merged = {n: collectives.add_by_tree(p) for n, p in zip(names, parts, strict=True)}
    effect = measure(gradient_quantity(folded), gradient_quantity(merged))
    return replace(found, effect=effect)
