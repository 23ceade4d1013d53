"""The axis `tp`: the whole model against tensor-parallel ranks.

Products of split layers are made again as the ranks compute them: some columns each, or partial sums that an
all-reduce adds. The list is complete if the run with all of them substituted is a run of the split model on simulated
ranks, bit for bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from isobit.auditing.axes import collectives
from isobit.auditing.axes.axes import NotApplicableError
from isobit.auditing.axes.sharded_products import AXIS, TensorWatcher
from isobit.auditing.axes.tensor_parallel_run import run_on_ranks
from isobit.auditing.axes.tensor_plan import Plan, Split, plan_of
from isobit.auditing.axes.variation import VariantCall, Variation
from isobit.auditing.inputs import Inputs
from isobit.auditing.judging.effects import outputs_of
from isobit.auditing.labels.labels import Rows
from isobit.auditing.records import AxisReport, Place, Unjudged
from isobit.auditing.replay.places import Places
from isobit.auditing.replay.watching import first_line

RANKS = 2


def tensor_parallel(inputs: Inputs) -> Variation:
    """Compare the whole model with two tensor-parallel ranks.

    The plan is that of the model (transformers' `_tp_plan`), or one recognised by the names of layers. An enabled
    model and layers of isobit.nn are split by `isobit.parallel`.

    Args:
        inputs: The batch, which every rank has.

    Raises:
        NotApplicableError: No layer of the model is known to be split.
    """
    plan = plan_of(inputs.model)
    if not plan.splits:
        raise NotApplicableError(
            "the model has no tensor-parallel plan, and no pair of layers that is known by name"
        )
    return TensorParallel(inputs, plan).variation()


class TensorParallel:
    """The split model, and what is known about it after the audit."""

    def __init__(self, inputs: Inputs, plan: Plan) -> None:
        """Audit these inputs with this plan."""
        self.inputs, self.plan = inputs, plan
        self.splits = by_storage(inputs.model, plan)
        self.watchers: list[TensorWatcher] = []
        self.failure = ""

    def variation(self) -> Variation:
        """Return what changes."""
        return Variation(
            AXIS,
            f"{RANKS} tensor-parallel ranks split {len(self.plan.splits)} linear layers",
            ("one worker", f"{RANKS} ranks"),
            self.inputs.run,
            (VariantCall(Rows([]), self.run, self.inputs.tokens),),
            around=nullcontext,
            watcher=self.watcher,
            after=self.add_to_report,
        )

    def watcher(self, places: Places) -> TensorWatcher:
        """Return the watcher of the audited run."""
        self.watchers.append(TensorWatcher(places, self.splits, RANKS))
        return self.watchers[-1]

    def run(self) -> dict[str, Tensor]:
        """Run the split model; where that is not possible, the whole one with the products of ranks."""
        try:
            return run_on_ranks(self.inputs, self.plan, RANKS)
        except Exception as error:  # a model may raise anything for a shape that it does not expect
            self.failure = first_line(error.__cause__ or error)
        with TensorWatcher(Places(self.inputs.model), self.splits, RANKS):
            return outputs_of(self.inputs.run())

    def add_to_report(self, report: AxisReport) -> AxisReport:
        """Add the collectives, the layers that are not replayed, and why the list is not complete."""
        judged = self.watchers[-1].collectives.values()
        unknown = [
            Unjudged(Place("tensor-parallel layer", pattern), AXIS, reason)
            for pattern, reason in self.plan.unknown.items()
        ]
        report = collectives.add_to_report(report, judged)
        report = replace(report, unjudged=report.unjudged + tuple(unknown))
        if self.failure:
            why = f"the model could not be run on {RANKS} ranks: {self.failure}"
            return replace(report, complete=False, why_not=why)
        if unknown:
            why = f"{unknown[0].place.module} and other layers of the plan were not split: {unknown[0].reason}"
            return replace(report, complete=False, why_not=why)
        if not report.complete and not report.unjudged:
            why = "operators that run on a rank's own heads or columns differ, too"
            return replace(report, why_not=why)
        return report


def by_storage(model: nn.Module, plan: Plan) -> dict[int, Split]:
    """Return the splits by the storage of the layers' weights, which also finds a weight in a fused call."""
    found: dict[int, Split] = {}
    for path, split in plan.splits.items():
        weight = model.get_submodule(path).weight
        assert isinstance(weight, torch.Tensor)
        found[weight.untyped_storage()._cdata] = split
    return found
