"""The results of runs, row by row: what of the audited run is compared with what of the variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from isobit import bits
from isobit.auditing.axes.axes import Variation, same_start
from isobit.auditing.judging.effects import Quantity, check_effect, choose, outputs_of, quantity_of
from isobit.auditing.labels.labels import EVERY, MIXED, Known, Labels, Rows, cut
from isobit.auditing.replay.merging import MIXED_OURS, merge_parts
from isobit.errors import ArgumentError, CutError
from isobit.integrations.transformers.state import find_state
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.gradients import Gradients

# Runs with a backward pass: a fixed gradient of the output, and the gradient of every parameter as output.
#
# The gradient that enters the backward pass is drawn once, a number for every element of the model's output, and each
# sample has its own rows of it in every variant. No loss is needed, and no normaliser depends on the batch.

GRADIENT = "gradient of "
MOST = 1 << 20  # numbers of all gradients on which the effect is measured
RATE = 1e-3  # of the step that shows the effect on weights


@dataclass
class Backward:
    """Add a backward pass to the runs of a variation."""

    model: nn.Module
    effect: str | None = None

    def add_to(self, variation: Variation) -> Variation:
        """Return the variation with a backward pass in every run."""
        with torch.no_grad(), same_start():
            outputs = outputs_of(variation.run())
        check_effect(self.effect, outputs)
        name = choose(outputs, self.effect)
        if name not in outputs:
            raise ArgumentError(
                expected="a model that returns a floating-point tensor, to audit the backward pass",
                received=f"outputs {', '.join(outputs)}" if outputs else "no tensor",
                remedy="return it alone, or in a dictionary, tuple or dataclass",
            )
        out = outputs[name]
        generator = torch.Generator().manual_seed(len(name) + out.numel())
        grad = torch.randn(out.shape, generator=generator, dtype=torch.float32)
        grad = (grad / max(out.shape[-1] if out.dim() else 1, 1) ** 0.5).to(out.device, out.dtype)
        marks = self.marks_of(variation, out)
        for dim, values in marks.items():  # rows that no call of the variant has get no gradient
            kept = torch.zeros(len(values), dtype=torch.bool)
            for call in variation.calls:
                kept |= torch.isin(values, call.rows.labels)
            shape = [1] * grad.dim()
            shape[dim] = -1
            grad = grad * kept.to(grad.device, grad.dtype).view(shape)
        share = self.shares(variation)
        calls = tuple(
            replace(call, run=self.run(call.run, name, part(grad, marks, call.rows), share, at))
            for at, call in enumerate(variation.calls)
        )
        inputs = (*variation.inputs, *((grad, dim, values) for dim, values in marks.items()))
        run = self.run(variation.run, name, grad)
        return replace(
            variation, run=run, calls=calls, inputs=inputs, accumulates=share is not None
        )

    def shares(self, variation: Variation) -> Shares | None:
        """Return what merges the gradients of an enabled model over samples, where the calls have all of them."""
        count, of = len(variation.calls), sum(len(c.rows.labels) for c in variation.calls)
        if not variation.mixes or find_state(self.model) is None:
            return None
        try:
            return Shares(self.model, GlobalBatch(of=of, micro_batches=count))
        except CutError:  # not a power of two: each sample's gradient is merged as autograd would
            return None

    def marks_of(self, variation: Variation, out: Tensor) -> dict[int, Tensor]:
        """Return the labels of the output: along the first two dimensions, where the inputs have them."""
        found: dict[int, Tensor] = {}
        for _, dim, values in variation.inputs:
            if dim < out.dim() and out.shape[dim] == len(values):
                found[dim] = values
        return found

    def run(
        self,
        forward: Callable[[], Any],
        name: str,
        grad: Tensor,
        share: Shares | None = None,
        index: int = 0,
    ) -> Callable[[], Any]:
        """Return a run that returns outputs and gradients; with a share, the last one has all gradients."""

        def run() -> dict[str, Tensor]:
            if share is None or index == 0:
                self.model.zero_grad(set_to_none=True)
            with torch.enable_grad(), share.collect(index) if share else nullcontext():
                outputs = outputs_of(forward())
                check_gradient(name, outputs[name])
                outputs[name].backward(grad)  # type: ignore[no-untyped-call]
            if share is not None and index < share.batch.micro_batches - 1:
                return {n: t.detach() for n, t in outputs.items()}
            gradients = {
                f"{GRADIENT}{n}": p.grad
                for n, p in self.model.named_parameters()
                if p.grad is not None
            }
            self.model.zero_grad(set_to_none=True)
            return {**{n: t.detach() for n, t in outputs.items()}, **gradients}

        return run


def check_gradient(name: str, output: Tensor) -> None:
    """Raise ArgumentError for an output that has no gradient."""
    if not output.requires_grad:
        raise ArgumentError(
            expected="an output that requires a gradient, to audit the backward pass",
            received=f"{name} does not: no parameter that it depends on requires one",
            remedy="call model.requires_grad_(True), or audit without backward",
        )


@dataclass
class Shares:
    """Merge the gradients of one step over micro-batches; tied weights are apart only while it is open."""

    model: nn.Module
    batch: GlobalBatch
    open: Gradients | None = None

    @contextmanager
    def collect(self, index: int) -> Iterator[None]:
        """Collect one micro-batch; the first opens the step and the last closes it."""
        if index == 0:
            self.open = Gradients(self.model, self.batch)
        assert self.open is not None
        try:
            with self.open.micro_batch(index):
                yield
        except BaseException:
            self.open.close()
            raise
        if index == self.batch.micro_batches - 1:
            self.open.close()


def part(grad: Tensor, marks: Mapping[int, Tensor], rows: Rows) -> Tensor:
    """Return the rows of the gradient that a call of the variant has."""
    for dim, values in marks.items():
        index = torch.isin(values, rows.labels).nonzero().flatten()
        grad = grad.index_select(dim, index.to(grad.device))
    return grad


def gradient_quantity(outputs: Mapping[str, Tensor]) -> Quantity:
    """Return numbers of every gradient, evenly spread, as one quantity."""
    found = [t for name, t in outputs.items() if name.startswith(GRADIENT)]
    step = max(1, sum(t.numel() for t in found) // MOST)
    numbers = [t.reshape(-1)[::step].double().cpu() for t in found]
    return Quantity("gradients", torch.cat(numbers) if numbers else torch.zeros(0))


def step_quantity(model: nn.Module, outputs: Mapping[str, Tensor]) -> Quantity:
    """Return numbers of every weight after one step of AdamW with these gradients."""
    found = []
    for name, parameter in model.named_parameters():
        grad = outputs.get(f"{GRADIENT}{name}")
        if grad is None:
            continue
        weight = nn.Parameter(parameter.detach().clone())
        weight.grad = grad.to(weight.dtype)
        torch.optim.AdamW([weight], lr=RATE).step()
        found.append(weight.detach())
    step = max(1, sum(t.numel() for t in found) // MOST)
    numbers = [t.reshape(-1)[::step].double().cpu() for t in found]
    return Quantity("weights after a step", torch.cat(numbers) if numbers else torch.zeros(0))


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
