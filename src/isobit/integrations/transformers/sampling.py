"""Sampling for generate() that depends on seed, sample and position, and not on the batch.

The draw is that of `isobit.sampling.sample`; every other token is set to -inf, and greedy decoding does the rest:

    generate(**inputs, do_sample=False, logits_processor=[KeyedSampling(7, attention_mask=inputs["attention_mask"])])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType

import torch
from torch import Tensor
from transformers import LogitsProcessor

from isobit.errors import ArgumentError
from isobit.sampling.drawing import Drawn, sample


class KeyedSampling(LogitsProcessor):
    """A logits processor for generate() that samples by a key, so that a draw does not depend on the batch.

    It leaves the token that is drawn and sets all others to -inf: call generate() with do_sample=False and one beam.
    A draw depends on (seed, sample, position) and the logits alone, and is that of `isobit.sampling.sample`. Nothing is
    stored between calls.

    Args:
        seed: The seed of all draws.
        temperature: Divides the logits.
        top_k: Keep the k most likely tokens.
        top_p: Keep the most likely tokens whose probabilities sum to p.
        samples: A number for each row, by default 0, 1, …: a sample has the same draws in any batch under its number.
        attention_mask: The mask that generate() receives, or None if no prompt is padded. Required.

    Raises:
        ArgumentError: If an option is out of range, or the mask is missing.

    Example:
        >>> draws = isobit.KeyedSampling(seed=7, temperature=0.8, attention_mask=None)
        >>> model.generate(ids, logits_processor=[draws], do_sample=False)  # doctest: +SKIP
    """

    def __init__(
        self,
        seed: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        samples: Sequence[int] | Tensor | None = None,
        *,
        attention_mask: Tensor | EllipsisType | None = ...,
    ) -> None:
        if attention_mask is ...:
            raise ArgumentError(
                expected="attention_mask=, because draws of a padded prompt depend on its padding",
                received="no attention_mask",
                remedy="pass the mask that generate() is given; or attention_mask=None if no prompt is padded",
            )
        refuse_unless(
            temperature > 0 and math.isfinite(temperature), "temperature above 0", temperature
        )
        refuse_unless(top_k is None or top_k >= 1, "top_k of at least 1, or None", top_k)
        refuse_unless(top_p is None or 0 < top_p <= 1, "top_p in (0, 1], or None", top_p)
        self.seed, self.temperature, self.top_k, self.top_p = seed, temperature, top_k, top_p
        self.samples = (
            None
            if samples is None
            else torch.as_tensor(samples, dtype=torch.int64).cpu().reshape(-1)
        )
        self.padding = count_padding(attention_mask) if isinstance(attention_mask, Tensor) else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores with 0 at the draw and -inf elsewhere."""
        tokens = self.draw(input_ids, scores).tokens
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)

    def draw(self, input_ids: Tensor, scores: Tensor) -> Drawn:
        """Return the draw of each row."""
        rows, width = input_ids.shape
        samples = self._per_row("samples", self.samples, torch.arange(rows, device="cpu"), rows)
        padding = self._per_row(
            "rows of attention_mask",
            self.padding,
            torch.zeros(rows, dtype=torch.int64, device="cpu"),
            rows,
        )
        return sample(
            scores,
            seed=self.seed,
            requests=samples,
            positions=width - padding,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )

    def _per_row(self, what: str, given: Tensor | None, otherwise: Tensor, rows: int) -> Tensor:
        if given is not None and len(given) != rows:
            raise ArgumentError(
                expected=f"as many {what} as rows",
                received=f"{len(given)} for {rows} rows",
                remedy="repeat each as often as num_return_sequences says, and use one beam",
            )
        return otherwise if given is None else given


def refuse_unless(kept: bool, expected: str, received: object) -> None:
    """Raise ArgumentError."""
    if not kept:
        raise ArgumentError(expected=expected, received=repr(received), remedy="pass one that is")


def count_padding(attention_mask: Tensor) -> Tensor:
    """Return the number of padding positions on the left of each row; raise unless padding is on the left."""
    mask = attention_mask.long().cpu()
    if (
        mask.dim() != 2
        or bool((mask[:, 1:] < mask[:, :-1]).any())
        or bool(((mask != 0) & (mask != 1)).any())
    ):
        raise ArgumentError(
            expected="attention_mask [rows, width] of zeros and then ones",
            received=f"{list(mask.shape)} otherwise",
            remedy='pad prompts on the left: tokenizer.padding_side = "left"',
        )
    return mask.shape[1] - mask.sum(1)
