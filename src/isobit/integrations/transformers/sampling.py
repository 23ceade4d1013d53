"""Sampling for generate() that depends on seed, sample and position, and not on the batch.

The largest of logits / temperature + Gumbel noise is a draw from their softmax. The noise is a hash of (seed, sample,
position, token), so that no generator is shared among samples, and greedy decoding does the rest:

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
from isobit.ops.softmax.op import softmax

GOLDEN, FIRST, SECOND = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # splitmix64's, as int64
IN_CACHE = 2**17  # elements worked on at once
MASS = 2**40  # probabilities as whole numbers, whose sums are exact


class KeyedSampling(LogitsProcessor):
    """A logits processor for generate() that samples by a key, so that a draw does not depend on the batch.

    It adds noise to the logits so that the largest is the draw: call generate() with do_sample=False and one beam.
    A draw depends on (seed, sample, position) alone; nothing is stored between calls.

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
        """Return scores in fp64 whose largest is the draw."""
        rows, width = input_ids.shape
        samples = self._per_row("samples", self.samples, torch.arange(rows, device="cpu"), rows)
        padding = self._per_row(
            "rows of attention_mask",
            self.padding,
            torch.zeros(rows, dtype=torch.int64, device="cpu"),
            rows,
        )
        device = scores.device
        # Not by a number: a GPU would multiply by its reciprocal.
        logits = scores.double() / torch.full(
            (), self.temperature, dtype=torch.float64, device=device
        )
        keys = samples.to(device), (width - padding).to(device)
        noise = gumbel_noise(self.seed, *keys, scores.shape[-1])
        kept = keep_most_likely(logits, self.top_k, self.top_p)
        return torch.where(kept, logits + noise, -torch.inf)

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


# ---- noise: plain arithmetic on each element, so the same at every place ---------------------------------


def gumbel_noise(seed: int, samples: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return Gumbel noise [rows, vocabulary] in fp64: −log(−log u) of a hash of (seed, sample, position, token)."""
    key = mix(torch.full_like(samples, as_int64(seed)) + GOLDEN)
    for part in (samples, positions):
        key = mix((key ^ part) + GOLDEN)
    tokens = torch.arange(1, vocabulary + 1, device=key.device) * GOLDEN
    out = torch.empty(len(key), vocabulary, dtype=torch.float64, device=key.device)
    rows = max(IN_CACHE // vocabulary, 1)
    for some, to in zip(torch.split(key, rows), torch.split(out, rows), strict=True):
        bits = mix(some.unsqueeze(1) + tokens)
        uniform = shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)  # exact, and never 0 or 1
        to.copy_(log(log(uniform).neg_())).neg_()
    return out


def mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64, where products wrap around; x may be overwritten."""
    x = x.bitwise_xor_(shift_right(x, 30)).mul_(FIRST)
    x = x.bitwise_xor_(shift_right(x, 27)).mul_(SECOND)
    return x.bitwise_xor_(shift_right(x, 31))


def shift_right(x: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def as_int64(value: int) -> int:
    """Convert to int64 modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63


def log(x: Tensor) -> Tensor:
    """Return the logarithm of positive fp64 within 1e-9, by plain products and sums, equal in every SIMD lane."""
    mantissa, exponent = torch.frexp(x)
    low = (mantissa < math.sqrt(0.5)).int()
    mantissa.mul_(low + 1)
    s = (mantissa - 1).div_(mantissa.add_(1))
    square = s * s
    series = torch.full_like(s, 1 / 11)
    for odd in (9, 7, 5, 3, 1):
        series.mul_(square).add_(1 / odd)
    return exponent.sub_(low).double().mul_(math.log(2)).add_(s.mul_(2).mul_(series))


# ---- which tokens may be drawn ---------------------------------------------------------------------------


def keep_most_likely(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Keep the k largest (and ties with the k-th), then the fewest of these whose probability reaches p."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits >= logits.topk(top_k, dim=-1).values[:, -1:]
    if top_p is not None and top_p < 1:
        allowed = torch.where(kept, logits, -torch.inf).float()
        order = allowed.argsort(dim=-1, descending=True, stable=True)
        mass = (softmax(allowed) * float(MASS)).long().gather(-1, order)
        before = mass.cumsum(-1) - mass  # whole numbers: exact in any order
        kept &= torch.zeros_like(kept).scatter(-1, order, before < int(top_p * MASS))
    return kept
