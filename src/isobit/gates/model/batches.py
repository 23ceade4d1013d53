"""The samples of the batch-layout gate, and the batches that contain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.ops.logprob.op import IGNORED

LENGTHS = (11, 16, 13, 19)
PROMPT = 8  # tokens
CHUNK = 7  # tokens per call when a cache is used
WIDTH = 20  # of a padded row
PERMUTATION = (2, 0, 3, 1)
SELECTED = sum(LENGTHS) - len(LENGTHS)  # every token but a sample's first has a log-probability
TRAINED = sum(LENGTHS) - PROMPT * len(LENGTHS)  # only tokens after the prompt have a loss


@dataclass(frozen=True)
class Batch:
    """Samples laid out in [B, T]: position p of sample s is row spans[s][0] + p of the B·T."""

    ids: Tensor  # [B, T]
    mask: Tensor | None  # [B, T], 1 for tokens, 0 for padding
    positions: Tensor  # [B, T]
    packed: bool  # several samples in one row
    spans: dict[int, tuple[int, int]]  # by sample: its first of the B·T rows, and its length
    prompt: int = PROMPT  # tokens at the front of each sample that have no label

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """Return the rows of each sample from values of shape [B, T, ...]."""
        flat = values.reshape(-1, *values.shape[2:])
        return {
            sample: flat[start : start + length] for sample, (start, length) in self.spans.items()
        }

    def labels(self) -> Tensor:
        """Return labels [B, T] for transformers: the tokens after the prompt, -100 elsewhere."""
        spread = torch.full_like(self.ids, IGNORED).reshape(-1)
        for start, length in self.spans.values():
            held = slice(start + self.prompt, start + length)
            spread[held] = self.ids.reshape(-1)[held]
        return spread.reshape(self.ids.shape)

    def targets(self) -> Tensor:
        """Return targets [B, T]: the next token of the sample, -100 if there is none."""
        spread = torch.full_like(self.ids, IGNORED).reshape(-1)
        for start, length in self.spans.values():
            last = start + length - 1
            spread[start:last] = self.ids.reshape(-1)[start + 1 : last + 1]
        return spread.reshape(self.ids.shape)


def draw_samples(vocabulary: int, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Draw random tokens for samples of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]


def padded(
    samples: list[Tensor], side: str, *, order: Sequence[int] = range(4), width: int = WIDTH
) -> Batch:
    """Return a batch with one row per sample, padded on the left or the right."""
    device = samples[0].device
    ids = torch.zeros(len(order), width, dtype=torch.int64, device=device)
    mask, positions, spans = torch.zeros_like(ids), torch.zeros_like(ids), {}
    for row, sample in enumerate(order):
        length = len(samples[sample])
        start = width - length if side == "left" else 0
        held = slice(start, start + length)
        ids[row, held], mask[row, held] = samples[sample], 1
        positions[row, held] = torch.arange(length, device=device)
        spans[sample] = (row * width + start, length)
    return Batch(ids, mask, positions, False, spans)


def alone(samples: list[Tensor], sample: int) -> Batch:
    """Return a batch of one sample."""
    ids = samples[sample][None]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return Batch(ids, None, positions, False, {sample: (0, ids.shape[1])})


def packed(samples: list[Tensor]) -> Batch:
    """Return all samples in one row; positions restart at 0 where a sample begins."""
    positions = torch.cat([torch.arange(len(own), device=own.device) for own in samples])
    spans, at = {}, 0
    for index, sample in enumerate(samples):
        spans[index] = (at, len(sample))
        at += len(sample)
    return Batch(torch.cat(samples)[None], None, positions[None], True, spans)
