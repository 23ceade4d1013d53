"""The axis `dp`: one worker with the whole batch against ranks that have a part of it and all-reduce gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobit.auditing.axes.axes import NotApplicableError, VariantCall, Variation, same_start
from isobit.auditing.axes.outcomes import GRADIENT, Backward, gradient_quantity
from isobit.auditing.judging.accuracy import units, worst
from isobit.auditing.judging.effects import measure, outputs_of
from isobit.auditing.judging.findings import Comparison, compare, merge
from isobit.auditing.labels.labels import Rows
from isobit.auditing.records import ERROR, ORDER, Accuracy, AxisReport, Guilty, Place
from isobit.auditing.subjects import Inputs
from isobit.integrations.transformers.state import find_state
from isobit.order import tree
from isobit.simulator import World

# Judge the all-reduce of torch.distributed: the sum that simulated ranks get, against isobit's tree over ranks.
#
# With two ranks there is one order of addition. With more, a collective may add ranks one after another, around a ring,
# or along a tree, and its bits depend on the number of ranks and on the library.

OPERATOR = "c10d::allreduce_"
MOST_RANKS = 8
PATIENCE = 3600.0  # seconds; a rank computes as long as a model runs
REMEDY = "isobit.parallel.Gradients and isobit's parallel layers add ranks along one tree, whatever their number"


def all_reduce(parts: Sequence[Tensor]) -> Tensor:
    """Return what torch.distributed.all_reduce gives to simulated ranks that have these parts."""
    return all_reduce_many([[part] for part in parts])[0]


def all_reduce_many(by_rank: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the all-reduced sums of several tensors per rank, on the device of the first rank's."""

    def program(rank: int) -> list[Tensor]:
        sums = [part.detach().cpu().clone() for part in by_rank[rank]]
        for one in sums:
            dist.all_reduce(one)
        return sums

    values = World(len(by_rank), patience=PATIENCE).run(program).values
    return [one.to(part.device) for one, part in zip(values[0], by_rank[0], strict=True)]


def add_by_tree(parts: Sequence[Tensor]) -> Tensor:
    """Add the ranks' parts along isobit's tree, in their own dtype."""
    return tree.merge(list(parts), torch.add)


def ranks_that_divide(size: int) -> list[int]:
    """Return the numbers of ranks, powers of two up to 8, that divide a size."""
    return [ranks for ranks in (2, 4, MOST_RANKS) if size % ranks == 0]


def judge(axis: str, module: str, by_rank: Sequence[Sequence[Tensor]]) -> Guilty | None:
    """Compare the all-reduce of every tensor with the tree; return None if all bits are equal.

    Args:
        axis: The axis that is audited.
        module: The module whose results are reduced, "" for gradients.
        by_rank: For every rank its tensors.
    """
    total: Comparison | None = None
    errors = [0.0, 0.0]
    sums = all_reduce_many(by_rank)
    for at, folded in enumerate(sums):
        parts = [rank[at] for rank in by_rank]
        merged = add_by_tree(parts)
        total = merge(total, compare(folded, merged))
        wide, allowed = reference(parts)
        for side, value in enumerate((folded, merged)):
            errors[side] = max(errors[side], worst(value, wide, allowed))
    if total is None or not total.elements:
        return None
    ranks = len(by_rank)
    return Guilty(
        Place(OPERATOR, module, backward=axis == "dp"),
        axis,
        total.elements,
        total.of,
        total.ulps,
        total.largest,
        ERROR if max(errors) > 1 else ORDER,
        Accuracy("fp64", errors[0], errors[1]),
        total.first,
        (f"all_reduce of {ranks} ranks", f"tree of {ranks} ranks"),
        why_no_order="the collective adds ranks from left to right here; another library may not",
        remedy=REMEDY,
    )


def reference(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum in fp64, and the error of each element that a sum in any order may have."""
    wide = [part.double() for part in parts]
    magnitude = add_by_tree([one.abs() for one in wide])
    exact = add_by_tree(wide)
    dtype = parts[0].dtype
    return exact, units(exact, dtype) + len(parts) * torch.finfo(dtype).eps * magnitude


def add_to_report(report: AxisReport, found: Iterable[Guilty | None]) -> AxisReport:
    """Return a report with the collectives that were judged; None is one that is not guilty."""
    known = list(found)
    guilty = tuple(one for one in known if one is not None)
    return replace(
        report,
        operators=report.operators + len(known),
        judged=report.judged + len(known),
        guilty=report.guilty + guilty,
    )


def by_rank_of(outputs: Sequence[Mapping[str, Tensor]], prefix: str) -> list[list[Tensor]]:
    """Return for every rank its outputs whose names start with a prefix, in the order of the first rank's."""
    names = [name for name in outputs[0] if name.startswith(prefix)]
    return [[one[name] for name in names] for one in outputs]


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
    possible = ranks_that_divide(inputs.samples)
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
        return add_to_report(report, [judge_all_reduce(variation)])

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
        merge=all_reduce,
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
    by_rank = by_rank_of(outputs, GRADIENT)
    found = judge("dp", "", by_rank)
    if found is None:
        return None
    names = [name for name in outputs[0] if name.startswith(GRADIENT)]
    folded = dict(zip(names, all_reduce_many(by_rank), strict=True))
    parts = zip(*by_rank, strict=True)
    merged = {n: add_by_tree(p) for n, p in zip(names, parts, strict=True)}
    effect = measure(gradient_quantity(folded), gradient_quantity(merged))
    return replace(found, effect=effect)
