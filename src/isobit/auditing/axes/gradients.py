"""Runs with a backward pass: a fixed gradient of the output, and the gradient of every parameter as output.

The gradient that enters the backward pass is drawn once, a number for every element of the model's output, and each
sample has its own rows of it in every variant. No loss is needed, and no normaliser depends on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from isobit.auditing.axes.variation import Variation, same_start
from isobit.auditing.judging.effects import Quantity, check_effect, choose, outputs_of
from isobit.auditing.labels.labels import Rows
from isobit.errors import ArgumentError, CutError
from isobit.integrations.transformers.state import find_state
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.gradients import Gradients

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
            return Shares(self.model, GlobalBatch(total=of, micro_batches=count))
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
