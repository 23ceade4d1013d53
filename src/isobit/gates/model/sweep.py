"""Sweep batch size and padding: forward and backward of the same samples in batches of every size and width.

The layouts of `batch_layouts.py` are fixed. Here a user chooses batch sizes, amounts of padding, the lengths of the
samples and how many sets of random tokens are drawn; each pair of batch size and padding runs padded on the left and
on the right. Every call has exactly as many rows as the batch size: where the size does not divide the number of
samples, the last batch overlaps the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.gates.model.batch_layout_gate import (
    Comparison,
    GateReport,
    Progress,
    compare,
    report_of,
)
from isobit.gates.model.batch_layouts import (
    LENGTHS,
    PROMPT,
    Batch,
    Scorer,
    alone,
    packed,
    padded,
    train,
)

SIDES = ("right", "left")


@dataclass(frozen=True)
class Sweep:
    """What is varied: batch sizes, and tokens of padding beyond the longest sample of a batch."""

    batches: tuple[int, ...] = (1, 2, 3, 4)
    pads: tuple[int, ...] = (0, 1, 7, 64)
    lengths: tuple[int, ...] = LENGTHS
    seeds: int = 1

    def __post_init__(self) -> None:
        """Check that every batch can be filled, and that every sample has a token with a loss.

        Raises:
            ArgumentError: If one of the numbers is out of range.
        """
        numbers = (
            (min(self.batches, default=0) >= 1, "batch sizes of 1 or more", self.batches),
            (min(self.pads, default=-1) >= 0, "padding of 0 tokens or more", self.pads),
            (min(self.lengths, default=0) >= 3, "samples of 3 tokens or more", self.lengths),
            (self.seeds >= 1, "one seed or more", self.seeds),
        )
        for fits, expected, received in numbers:
            if not fits:
                raise ArgumentError(
                    expected=expected, received=str(received), remedy="isobit chain --help"
                )
        if max(self.batches) > len(self.lengths):
            raise ArgumentError(
                expected=f"{max(self.batches)} samples or more, to fill the largest batch",
                received=f"{len(self.lengths)} lengths",
                remedy="give more lengths, or smaller batches",
            )

    @property
    def steps(self) -> int:
        """How often `run_sweep` calls `progress`."""
        return self.seeds * len(self.batches) * (len(self.pads) + 1)


def run_sweep(
    scorer: Scorer,
    draws: Sequence[list[Tensor]],
    sweep: Sweep,
    progress: Progress = lambda _: None,
) -> GateReport:
    """Run every batch size with every padding and return three comparisons per batch size.

    Log-probabilities are compared with those of each sample alone. The loss and the gradients are those of the first
    samples that fill one batch, compared with that batch without padding beyond its longest sample.

    Args:
        scorer: The model, and how it computes log-probabilities and the loss.
        draws: The samples of each seed.
        sweep: Batch sizes and paddings.
        progress: Called with a name for each pair of batch size and padding when it is done.
    """
    rows = []
    for size in sweep.batches:
        found = [one for draw in draws for one in judge_size(scorer, draw, size, sweep, progress)]
        for quantity in ("log-probability", "loss", "gradient"):
            same = [one for one in found if one.quantity == quantity]
            rows.append(merge(same, describe(size, sweep, len(same))))
    return report_of(scorer, rows)


def describe(size: int, sweep: Sweep, layouts: int) -> str:
    """Name a row of the table: the batch size, the paddings and how many layouts were compared."""
    pads = f"{min(sweep.pads)} to {max(sweep.pads)}" if len(sweep.pads) > 1 else sweep.pads[0]
    return f"B={size}, padded by {pads}, and packed: {layouts} layouts"


def judge_size(
    scorer: Scorer, samples: list[Tensor], size: int, sweep: Sweep, progress: Progress
) -> Iterator[Comparison]:
    """Compare all layouts of one batch size on one set of samples."""
    single = score(scorer, [alone(samples, i) for i in range(len(samples))])
    windows = windows_of(len(samples), size)
    # A token that sees one key gives the queries no gradient, so a label two tokens in is the least.
    prompt = max(1, min(PROMPT, min(len(own) for own in samples) - 2))
    first = samples[:size]
    loss, gradients = train_once(scorer, padded_by(first, range(size), 0, "right", prompt))

    def forward(name: str, batches: Iterable[Batch]) -> Comparison:
        return compare("log-probability", name, pairs(single, score(scorer, batches)))

    def backward(name: str, batch: Batch) -> Iterator[Comparison]:
        found_loss, found = train_once(scorer, batch)
        yield compare("loss", name, [("loss", loss, found_loss)])
        yield compare("gradient", name, pairs(gradients, found))

    for pad in sweep.pads:
        for side in SIDES:
            name = f"B={size}, {pad} tokens of padding on the {side}"
            yield forward(name, (padded_by(samples, w, pad, side, prompt) for w in windows))
            if (pad, side) != (0, "right"):  # which is the reference
                yield from backward(name, padded_by(first, range(size), pad, side, prompt))
        progress(f"B={size}, padded by {pad}")
    name = f"B={size}, packed"
    yield forward(name, (packed_of(samples, w, prompt) for w in windows))
    yield from backward(name, replace(packed(first), prompt=prompt))
    progress(name)


def windows_of(count: int, size: int) -> list[range]:
    """Return ranges of exactly `size` samples that cover all of them; the last may overlap the one before it."""
    starts = [*range(0, count - size + 1, size)]
    if starts[-1] + size < count:
        starts.append(count - size)
    return [range(start, start + size) for start in starts]


def padded_by(samples: list[Tensor], held: range, pad: int, side: str, prompt: int) -> Batch:
    """Return some samples as a batch, padded to the longest of them and `pad` tokens more."""
    width = max(len(samples[i]) for i in held) + pad
    return replace(padded(samples, side, order=held, width=width), prompt=prompt)


def packed_of(samples: list[Tensor], held: range, prompt: int) -> Batch:
    """Return some samples in one row, under their numbers among all samples."""
    batch = packed([samples[i] for i in held])
    spans = {held[i]: span for i, span in batch.spans.items()}
    return replace(batch, spans=spans, prompt=prompt)


@torch.no_grad()
def score(scorer: Scorer, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Return the log-probabilities of each sample; a sample in two batches is kept twice, under two names."""
    found: dict[str, Tensor] = {}
    for batch in batches:
        values = scorer.logprobs(batch, slice(0, batch.ids.shape[1]), None)
        for sample, own in batch.gather(values).items():
            name = f"sample {sample}"
            found[f"{name}, again" if name in found else name] = own[:-1]
    return found


def train_once(scorer: Scorer, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward and return the loss and the gradients by name."""
    loss = train(batch, scorer)
    named: Iterable[tuple[str, Tensor]] = scorer.model.named_parameters()
    return loss, {name: p.grad for name, p in named if p.grad is not None}


def pairs(
    left: dict[str, Tensor], right: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each of `right` with its reference; what only the reference has is paired with zeros."""
    for name, found in right.items():
        yield name, left[name.removesuffix(", again")], found
    for name in left.keys() - right.keys():
        yield name, left[name], torch.zeros_like(left[name])


def merge(found: Sequence[Comparison], layout: str) -> Comparison:
    """Add the counts of comparisons of one quantity; keep the first difference with its layout."""
    worst = max(
        (one.aggregates for one in found if one.aggregates is not None),
        default=None,
        key=lambda aggregates: aggregates[0],
    )
    where = next((f"{one.layout}: {one.where}" for one in found if one.differ), "")
    where = where or next((f"{one.layout}: {one.where}" for one in found if one.where), "")
    return Comparison(
        found[0].quantity,
        layout,
        sum(one.numbers for one in found),
        sum(one.differ for one in found),
        sum(one.tensors for one in found),
        sum(one.tensors_differ for one in found),
        sum(one.idle for one in found),
        worst,
        where,
    )
