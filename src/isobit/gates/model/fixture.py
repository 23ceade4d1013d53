"""The workload of the gate: four samples, and the batches that hold them in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.ops.logprob.op import IGNORED

LENGTHS = (11, 16, 13, 19)
PROMPT = 8
CHUNK = 7
WIDTH = 20
PERMUTATION = (2, 0, 3, 1)
SELECTED = sum(LENGTHS) - len(LENGTHS)  # every token but a sample's first has a log-probability
TRAINED = sum(LENGTHS) - PROMPT * len(LENGTHS)  # the loss is of those behind the prompt


@dataclass(frozen=True)
class Batch:
    """Samples laid out in [B, T]; the number of (sample, position) stands at row spans[sample][0] + position."""

    ids: Tensor
    mask: Tensor | None
    positions: Tensor
    packed: bool
    spans: dict[
        int, tuple[int, int]
    ]  # of each sample held: its first row of the B·T, and its length

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """[B, T, ...] back to samples: all rows of each."""
        flat = values.reshape(-1, *values.shape[2:])
        return {
            sample: flat[start : start + length] for sample, (start, length) in self.spans.items()
        }

    def labels(self) -> Tensor:
        """[B, T] as transformers takes them: the token itself behind the prompt, -100 elsewhere."""
        spread = torch.full_like(self.ids, IGNORED).reshape(-1)
        for start, length in self.spans.values():
            held = slice(start + PROMPT, start + length)
            spread[held] = self.ids.reshape(-1)[held]
        return spread.reshape(self.ids.shape)

    def targets(self) -> Tensor:
        """[B, T]: the token that follows in the sample, -100 where none does."""
        spread = torch.full_like(self.ids, IGNORED).reshape(-1)
        for start, length in self.spans.values():
            last = start + length - 1
            spread[start:last] = self.ids.reshape(-1)[start + 1 : last + 1]
        return spread.reshape(self.ids.shape)


def draw_samples(vocabulary: int, seed: int = 0) -> list[Tensor]:
    """The tokens of the four samples."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in LENGTHS]


def padded(
    samples: list[Tensor], side: str, *, order: Sequence[int] = range(4), width: int = WIDTH
) -> Batch:
    """A row of the batch for each sample, in this order."""
    ids = torch.zeros(len(order), width, dtype=torch.int64)
    mask, positions, spans = torch.zeros_like(ids), torch.zeros_like(ids), {}
    for row, sample in enumerate(order):
        length = len(samples[sample])
        start = width - length if side == "left" else 0
        held = slice(start, start + length)
        ids[row, held], mask[row, held] = samples[sample], 1
        positions[row, held] = torch.arange(length)
        spans[sample] = (row * width + start, length)
    return Batch(ids, mask, positions, False, spans)


def alone(samples: list[Tensor], sample: int) -> Batch:
    """One sample, by itself."""
    ids = samples[sample][None]
    return Batch(ids, None, torch.arange(ids.shape[1])[None], False, {sample: (0, ids.shape[1])})


def packed(samples: list[Tensor]) -> Batch:
    """All samples in one row, told apart by positions that restart."""
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])
    spans, at = {}, 0
    for index, sample in enumerate(samples):
        spans[index] = (at, len(sample))
        at += len(sample)
    return Batch(torch.cat(samples)[None], None, positions[None], True, spans)
