"""The results of runs, row by row: what of the audited run is compared with what of the variant."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from isobit import bits
from isobit.auditing.axes.gradients import GRADIENT, gradient_quantity, step_quantity
from isobit.auditing.axes.variation import Variation
from isobit.auditing.judging.effects import Quantity, choose, quantity_of
from isobit.auditing.labels.labels import EVERY, MIXED, Known, Labels, cut
from isobit.auditing.replay.merging import MIXED_OURS, merge_parts

Outputs = Mapping[str, Tensor]


@dataclass
class Outcomes:
    """Compare outputs of the audited run with those of the variant.

    Attributes:
        model: the model.
        variation: what changes.
        effect: the output on which the effect is measured; None chooses.
        marks: the marks of the audited run's outputs.
        parts: each sample's part of gradients that isobit keeps wider than their dtype until all samples are merged.
        merged: whether the variant itself accumulated gradients over its calls.
        totals: outputs that are one number over all samples, such as a loss: none of it is a sample's, so it is not
            compared; the operator that adds it up is among those that are not judged.
    """

    model: nn.Module
    variation: Variation
    effect: str | None = None
    marks: dict[str, Known] = field(default_factory=dict)
    merged: bool = False
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    totals: set[str] = field(default_factory=set, init=False)

    def of_run(self, outputs: Outputs) -> dict[str, list[Tensor]]:
        """Return the rows of the audited run for every call of the variant, and whole gradients."""
        found: dict[str, list[Tensor]] = {}
        for name, tensor in outputs.items():
            marks = self.marks.get(name, {})
            if not tensor.dim() and marks in (MIXED, MIXED_OURS) and not self.is_whole(name):
                self.totals.add(name)
            elif self.is_whole(name):
                found[name] = [tensor]
            elif not self.why_unknown(name) and not isinstance(marks, str):
                found[name] = [cut(tensor, marks, call.rows) for call in self.variation.calls]
        return found

    def why_unknown(self, name: str) -> str:
        """Return why the rows of an output cannot be compared with the variant's, "" if they can."""
        marks = self.marks.get(name, {})
        if self.is_whole(name):
            return ""
        if isinstance(marks, str):
            return marks
        if not all(in_order(labels) for labels in marks.values()):
            return "its rows are in another order than those of the inputs"
        return ""

    def of_variant(self, outputs: Sequence[Outputs]) -> dict[str, list[Tensor]]:
        """Return the same of the variant."""
        found: dict[str, list[Tensor]] = {}
        for name in dict.fromkeys(name for one in outputs for name in one):
            if name in self.totals:
                continue
            if not self.is_whole(name):
                found[name] = [one[name] for one in outputs if name in one]
            elif self.variation.mixes and not self.merged:
                parts = [one[name] for one in outputs if name in one]
                ours = self.marks.get(name) == MIXED_OURS
                merge = None if ours else self.variation.merge
                kept = self.not_rounded(name, parts)
                found[name] = [merge(parts) if merge else merge_parts(kept, ours, parts[0].dtype)]
            else:
                found[name] = [one[name] for one in outputs if name in one][-1:]
        return found

    def not_rounded(self, name: str, alone: list[Tensor]) -> list[Tensor]:
        """Return the parts of a gradient before they are rounded, if each of them rounds to that sample's gradient."""
        parts = self.parts.get(name, [])
        rounded = [part.to(alone[0].dtype) for part in parts]
        return parts if parts and all_equal(rounded, alone) else alone

    def is_whole(self, name: str) -> bool:
        """Return whether an output is compared as a whole: a gradient, or any output where rows stay together."""
        return name.startswith(GRADIENT) or self.variation.around is not None

    def equal(
        self, run: Mapping[str, list[Tensor]], variant: Mapping[str, list[Tensor]]
    ) -> list[str] | None:
        """Return the names of outputs that differ in any bit or cannot be compared, or None if there are none."""
        known = {**self.marks, **run, **variant}
        if not set(known) - self.totals:
            return None
        return [
            name
            for name in known
            if name not in self.totals
            if self.why_unknown(name) or not all_equal(run.get(name, []), variant.get(name, []))
        ]

    def quantity(self, rows: Mapping[str, list[Tensor]]) -> Quantity | None:
        """Return what is measured: gradients if there are any, else log-probabilities or an output's numbers."""
        whole = {name: parts[0] for name, parts in rows.items() if name.startswith(GRADIENT)}
        if whole and self.effect in (None, "grad"):
            return gradient_quantity(whole)
        plain = {name: parts for name, parts in rows.items() if name not in whole}
        if not plain:
            return None
        chosen = choose({name: parts[0] for name, parts in plain.items()}, self.effect)
        if chosen not in plain:
            return None
        return quantity_of(self.join(plain[chosen]), chosen, self.tokens())

    def step(self, rows: Mapping[str, list[Tensor]]) -> Quantity | None:
        """Return the weights after a step with these gradients, if there are any."""
        whole = {name: parts[0] for name, parts in rows.items() if name.startswith(GRADIENT)}
        return step_quantity(self.model, whole) if whole else None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the rows of the variant's calls."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), self.variation.joined)

    def tokens(self) -> Tensor | None:
        """Return the tokens of the rows, if the model reads tokens."""
        known = [call.tokens for call in self.variation.calls]
        found = [t for t in known if t is not None]
        return self.join(found) if found and len(found) == len(known) else None


def all_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether two lists of tensors have the same bits."""
    return len(ours) == len(theirs) and all(map(bits.equal, ours, theirs))


def in_order(labels: Labels) -> bool:
    """Return whether rows are in the order of the inputs, as a reader takes them to be.

    Labels may repeat inside a sample ([B, T] as [B·T]) or all of them in turn ([T, B] as [T·B]); they may not go from
    one sample to an earlier one in any other way.
    """
    known = labels.values[labels.values != EVERY]
    once = torch.unique_consecutive(known)
    starts = [0, *((once[1:] < once[:-1]).nonzero().flatten() + 1).tolist(), len(once)]
    turns = [once[a:b] for a, b in itertools.pairwise(starts)]
    return all(torch.equal(turn, turns[0]) for turn in turns)
