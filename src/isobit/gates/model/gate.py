"""Puts a model through every layout and compares: log-probabilities, loss, every gradient, weights after AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobit import bits
from isobit.gates.model.layouts import generate_and_score, selected_layouts, trained_layouts
from isobit.gates.model.locate import first_module
from isobit.gates.model.scorers import Scorer

LEARNING_RATE = 1e-3
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One quantity under one layout, against the first layout of that quantity."""

    quantity: str
    layout: str
    numbers: int  # how many were compared
    differ: int
    tensors: int
    tensors_differ: int
    idle: int = 0  # tensors that say nothing: all zero, or not finite
    # Of log-probabilities, d the difference: max |d|, mean(e^d − 1 − d), share of e^d outside [0.8, 1.2].
    aggregates: tuple[float, float, float] | None = None
    where: str = ""  # what differs first

    @property
    def kept(self) -> bool:
        """Whether there was something to compare, and every bit agreed."""
        return self.numbers > 0 and self.differ == 0 and self.idle == 0


@dataclass(frozen=True)
class Report:
    """What the gate found of one side."""

    side: str
    parameters: int
    trained: int  # those that have a gradient
    rows: tuple[Row, ...]

    @property
    def kept(self) -> bool:
        """Whether every row is, and no parameter was left out."""
        return (
            bool(self.rows)
            and all(row.kept for row in self.rows)
            and self.trained == self.parameters
        )


def count_steps(samples: list[Tensor]) -> int:
    """How often `run_gate` tells."""
    return len(selected_layouts(samples)) + 1 + len(trained_layouts(samples))


def run_gate(scorer: Scorer, samples: list[Tensor], tell: Tell = lambda _: None) -> Report:
    """Every row; `tell` hears the name of each layout when it is done."""
    rows = [*judge_selected(scorer, samples, tell), judge_generated(scorer, samples, tell)]
    rows += judge_trained(scorer, samples, tell)
    parameters = list(scorer.model.parameters())
    trained = sum(1 for p in parameters if p.grad is not None)
    scorer.model.zero_grad(set_to_none=True)
    return Report(scorer.name, len(parameters), trained, tuple(rows))


def judge_selected(scorer: Scorer, samples: list[Tensor], tell: Tell) -> Iterator[Row]:
    """Selected log-probabilities, each layout against the samples by themselves."""
    reference, name_of_reference, module = None, "", ""
    for name, run in selected_layouts(samples).items():
        found = run(scorer)
        tell(name)
        if reference is None:
            reference, name_of_reference = found, name
            continue
        row = compare("log-probability", f"{name} = {name_of_reference}", [("", reference, found)])
        if not row.kept:
            module = module or first_module(
                scorer, samples
            )  # once: what differs first is what is wrong in all
            row = replace(row, where=f"{row.where}; first in {module}")
        yield row


def judge_generated(scorer: Scorer, samples: list[Tensor], tell: Tell) -> Row:
    """What `generate` saw, against the score of what it made."""
    rolled, again = generate_and_score(samples, scorer)
    tell("generate, then score")
    return compare(
        "log-probability",
        "generate, padded left, with cache = scored, padded right",
        [("", rolled, again)],
    )


def judge_trained(scorer: Scorer, samples: list[Tensor], tell: Tell) -> Iterator[Row]:
    """Loss, gradients and weights after one step, each layout against the first."""
    parameters = dict(scorer.model.named_parameters())
    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    reference = ""
    for name, run in trained_layouts(samples).items():
        loss = run(scorer)
        found = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        if not losses:
            losses, gradients, reference = [loss], found, name
            tell(f"backward, {name}")
            continue
        layout = f"{name} = {reference}"
        yield compare("loss", layout, [("loss", losses[0], loss)])
        yield compare("gradient", layout, ((n, gradients[n], found[n]) for n in gradients))
        yield compare(
            "weight after AdamW", layout, stepped_pairs(parameters, gradients, found, digests)
        )
        tell(f"backward, {name}")


def stepped_pairs(
    parameters: dict[str, Tensor],
    left: dict[str, Tensor],
    right: dict[str, Tensor],
    digests: dict[str, str],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each weight after a step with either gradient; the reference's are remembered as digests, to save memory."""
    for name, parameter in parameters.items():
        if name not in digests:
            digests[name] = bits.digest(step(parameter, left[name]))
        found = step(parameter, right[name])
        same = bits.digest(found) == digests[name]
        yield name, found if same else step(parameter, left[name]), found


def step(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The parameter after one step of torch's own AdamW; the parameter itself stays."""
    copy = torch.nn.Parameter(parameter.detach().clone())
    copy.grad = gradient
    torch.optim.AdamW([copy], lr=LEARNING_RATE).step()
    return copy.detach()


def compare(quantity: str, layout: str, pairs: Iterable[tuple[str, Tensor, Tensor]]) -> Row:
    """Counts what differs, element by element; pairs are (name, of the reference, of this layout)."""
    numbers = differ = tensors = wrong = idle = 0
    where, aggregates = "", None
    for name, left, right in pairs:
        apart = None if bits.equal(left, right) else bits.first_difference(left, right)
        numbers += left.numel()
        tensors += 1
        idle += not bool(right.isfinite().all()) or not bool(right.any())
        if apart is not None:
            wrong += 1
            differ += left.numel() if apart.count is None else apart.count
            where = where or f"{name} {apart}".strip()
        if quantity == "log-probability":
            aggregates = aggregate(left, right)
    return Row(quantity, layout, numbers, differ, tensors, wrong, idle, aggregates, where)


def aggregate(left: Tensor, right: Tensor) -> tuple[float, float, float]:
    """max |d|, mean(e^d − 1 − d) and the share of e^d outside [0.8, 1.2], in fp64."""
    d = (right.double() - left.double()).reshape(-1)
    ratio = d.exp()
    clipped = ((ratio < 0.8) | (ratio > 1.2)).double()
    return float(d.abs().max()), float((torch.expm1(d) - d).mean()), float(clipped.mean())
