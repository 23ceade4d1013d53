"""The batch-layout gate: run a model in every layout of a batch and compare raw bits.

Compared are log-probabilities, the loss, every gradient, and every weight after one AdamW step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.gates.model.batch_layouts import (
    WIDTH,
    Batch,
    Scorer,
    alone,
    generate_and_score,
    packed,
    padded,
    selected_layouts,
    through_cache,
    trained_layouts,
)
from isobit.integrations.transformers.structure import is_called

# Find the first module whose output changes with the batch layout, for a failed gate's report.


def first_module(scorer: Scorer, samples: list[Tensor]) -> str:
    """Return the first module, in order of execution, whose output depends on the batch layout."""
    single: dict[str, dict[int, Tensor]] = {}
    for batch in (alone(samples, i) for i in range(len(samples))):
        for name, rows in watch(scorer, batch).items():
            single.setdefault(name, {}).update(rows)
    right, left = padded(samples, "right"), padded(samples, "left")
    for batch, chunks in (
        (right, None),
        (left, None),
        (packed(samples), None),
        (left, [1] * WIDTH),
    ):
        for name, rows in watch(scorer, batch, chunks).items():
            if any(not bits.equal(rows[sample], single[name][sample]) for sample in rows):
                return name
    return "no module: what is computed from the last hidden states"


@torch.no_grad()
def watch(
    scorer: Scorer, batch: Batch, chunks: Sequence[int] | None = None
) -> dict[str, dict[int, Tensor]]:
    """Return each module's output rows by sample, in the order in which modules finished.

    The batch runs in one call, or in chunks with a cache.
    """
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple) else output
            if isinstance(found, Tensor) and found.dim() > 2 and len(found) == len(batch.ids):
                seen.setdefault(name, []).append(found.clone())

        return hook

    with ExitStack() as hooks:
        for name, module in scorer.model.named_modules():
            if scorer.name == "stock" or is_called(scorer.model, name, module):
                hooks.callback(module.register_forward_hook(keep(name)).remove)
        if chunks is None:
            scorer.logprobs(batch, slice(0, batch.ids.shape[1]), None)
        else:
            through_cache(scorer, batch, chunks)
    return {name: batch.gather(torch.cat(parts, dim=1)) for name, parts in seen.items()}


LEARNING_RATE = 1e-3
Layouts = dict[str, Callable[[Scorer], Tensor]]
Progress = Callable[[str], None]  # called with the name of each layout when it is done


@dataclass(frozen=True)
class Comparison:
    """One quantity in one layout, compared with the first layout of that quantity."""

    quantity: str
    layout: str
    numbers: int  # elements that were compared
    differ: int  # elements that differ
    tensors: int
    tensors_differ: int
    idle: int = 0  # tensors whose comparison is worthless: all zero, or not finite
    # For log-probabilities with difference d: max |d|, mean(e^d − 1 − d), and the fraction of e^d
    # outside [0.8, 1.2].
    aggregates: tuple[float, float, float] | None = None
    where: str = ""  # the first difference

    @property
    def kept(self) -> bool:
        """Whether something was compared and every bit agreed."""
        return self.numbers > 0 and self.differ == 0 and self.idle == 0


@dataclass(frozen=True)
class GateReport:
    """All comparisons of one side: isobit or stock."""

    side: str
    parameters: int  # that require a gradient
    trained: int  # that have one
    rows: tuple[Comparison, ...]
    frozen: int = 0  # parameters that require no gradient

    @property
    def differs(self) -> bool:
        """Whether some number differs; without one, a report that is not kept lacks evidence."""
        return any(row.differ for row in self.rows)

    @property
    def kept(self) -> bool:
        """Whether every comparison agreed and every parameter that is trained has a gradient."""
        return (
            bool(self.rows)
            and all(row.kept for row in self.rows)
            and self.trained == self.parameters
        )


def count_steps(samples: list[Tensor], few: bool = False) -> int:
    """Return how often `run_gate` calls `progress`."""
    return len(selected_layouts(samples, few)) + 1 + len(trained_layouts(samples, few))


def run_gate(
    scorer: Scorer,
    samples: list[Tensor],
    progress: Progress = lambda _: None,
    few: bool = False,
) -> GateReport:
    """Run every layout and return all comparisons.

    Args:
        scorer: The model, and how it computes log-probabilities and the loss.
        samples: The tokens of each sample.
        progress: Called with the name of each layout when it is done.
        few: Leave out layouts of many calls, and threads.
    """
    scored, trainings = selected_layouts(samples, few), trained_layouts(samples, few)
    rows = [*judge_selected(scorer, samples, scored, progress)]
    rows.append(judge_generated(scorer, samples, progress))
    rows += judge_trained(scorer, trainings, progress)
    return report_of(scorer, rows)


def report_of(scorer: Scorer, rows: Iterable[Comparison]) -> GateReport:
    """Return a report with the counts of the last backward; frozen parameters are counted apart."""
    every = list(scorer.model.parameters())
    parameters = [p for p in every if p.requires_grad]
    trained = sum(1 for p in parameters if p.grad is not None)
    scorer.model.zero_grad(set_to_none=True)
    frozen = len(every) - len(parameters)
    return GateReport(scorer.name, len(parameters), trained, tuple(rows), frozen)


def judge_selected(
    scorer: Scorer, samples: list[Tensor], layouts: Layouts, progress: Progress
) -> Iterator[Comparison]:
    """Compare log-probabilities in each layout with those of the samples one at a time."""
    reference, name_of_reference, module = None, "", ""
    for name, run in layouts.items():
        found = run(scorer)
        progress(name)
        if reference is None:
            reference, name_of_reference = found, name
            continue
        row = compare("log-probability", f"{name} = {name_of_reference}", [("", reference, found)])
        if not row.kept:
            module = module or first_module(scorer, samples)  # searched once for all layouts
            row = replace(row, where=f"{row.where}; first in {module}")
        yield row


def judge_generated(scorer: Scorer, samples: list[Tensor], progress: Progress) -> Comparison:
    """Compare the log-probabilities that `generate` saw with those of scoring its output."""
    rolled, again = generate_and_score(samples, scorer)
    progress("generate, then score")
    return compare(
        "log-probability",
        "generate, padded left, with cache = scored, padded right",
        [("", rolled, again)],
    )


def judge_trained(scorer: Scorer, layouts: Layouts, progress: Progress) -> Iterator[Comparison]:
    """Compare loss, gradients and weights after one step in each layout with the first layout."""
    parameters = {n: p for n, p in scorer.model.named_parameters() if p.requires_grad}
    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    reference = ""
    for name, run in layouts.items():
        loss = run(scorer)
        found = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        if not losses:
            losses, gradients, reference = [loss], found, name
            progress(f"backward, {name}")
            continue
        layout = f"{name} = {reference}"
        yield compare("loss", layout, [("loss", losses[0], loss)])
        yield compare("gradient", layout, ((n, gradients[n], found[n]) for n in gradients))
        yield compare(
            "weight after AdamW", layout, stepped_pairs(parameters, gradients, found, digests)
        )
        progress(f"backward, {name}")


def stepped_pairs(
    parameters: dict[str, Tensor],
    left: dict[str, Tensor],
    right: dict[str, Tensor],
    digests: dict[str, str],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each weight after a step with either gradient.

    The reference's weights are kept as digests to save memory.
    """
    for name, parameter in parameters.items():
        if name not in digests:
            digests[name] = bits.digest(step(parameter, left[name]))
        found = step(parameter, right[name])
        same = bits.digest(found) == digests[name]
        yield name, found if same else step(parameter, left[name]), found


def step(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the parameter after one step of torch's AdamW, without changing it."""
    copy = torch.nn.Parameter(parameter.detach().clone())
    copy.grad = gradient
    torch.optim.AdamW([copy], lr=LEARNING_RATE).step()
    return copy.detach()


def compare(quantity: str, layout: str, pairs: Iterable[tuple[str, Tensor, Tensor]]) -> Comparison:
    """Count the differing elements of pairs (name, reference, this layout)."""
    numbers = differ = tensors = wrong = idle = 0
    where, nothing, aggregates = "", "", None
    for name, left, right in pairs:
        difference = None if bits.equal(left, right) else bits.first_difference(left, right)
        numbers += left.numel()
        tensors += 1
        if not bool(right.isfinite().all()) or not bool(right.any()):
            idle += 1
            nothing = nothing or f"{name or quantity}: zero everywhere, or not finite".strip()
        if difference is not None:
            wrong += 1
            differ += left.numel() if difference.count is None else difference.count
            where = where or f"{name} {difference}".strip()
        if quantity == "log-probability":
            found = aggregate(left, right)
            aggregates = found if aggregates is None else max(aggregates, found)
    where = where or nothing
    return Comparison(quantity, layout, numbers, differ, tensors, wrong, idle, aggregates, where)


def aggregate(left: Tensor, right: Tensor) -> tuple[float, float, float]:
    """Return max |d|, mean(e^d − 1 − d) and the fraction of e^d outside [0.8, 1.2], in fp64."""
    d = (right.double() - left.double()).reshape(-1)
    ratio = d.exp()
    clipped = ((ratio < 0.8) | (ratio > 1.2)).double()
    return float(d.abs().max()), float((torch.expm1(d) - d).mean()), float(clipped.mean())
