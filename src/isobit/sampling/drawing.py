"""`sample`: one token per row of logits, drawn by a key, with the log-probability under the policy that drew it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.softmax.op import softmax
from isobit.sampling.keys import Whole, uniform
from isobit.sampling.support import (
    MASS,
    Number,
    check_temperature,
    keep_most_likely,
    support_ids,
    wrong,
)


@dataclass(frozen=True)
class Drawn:
    """What `sample` drew.

    Attributes:
        tokens: Token ids, [rows].
        logprobs: log p of each token under the policy that drew it, [rows] in fp32: of the logits divided by the
            temperature, normalised over the tokens that were kept. 0 where the temperature is 0.
        kept: Which tokens could be drawn, [rows, vocabulary].

    Example:
        >>> drawn = isobit.sampling.sample(
        ...     torch.tensor([[0.0, 2.0, 1.0]]), seed=0, requests=0, positions=0, temperature=0.0
        ... )
        >>> drawn.tokens, drawn.support
        (tensor([1]), tensor([[1]]))
    """

    tokens: Tensor
    logprobs: Tensor
    kept: Tensor

    @property
    def support(self) -> Tensor:
        """The ids that could be drawn, filled up with -1: `support=` of isobit.logprobs."""
        return support_ids(self.kept)


@torch.no_grad()
def sample(
    logits: Tensor,
    *,
    seed: Whole,
    requests: Whole,
    positions: Whole,
    temperature: Number = 1.0,
    top_k: Number = None,
    top_p: Number = None,
) -> Drawn:
    """Draw a token per row by (seed, request, position): a row's draw does not depend on the batch.

    A trainer that scores these tokens with the same temperature and `support=` has the same log-probabilities, bit for
    bit. Ties are broken by the lowest id, in greedy decoding and in top-k and top-p; see [Note: ties] in support.py.

    Args:
        logits: Shape [rows, vocabulary] in fp32, as the head summed them; -inf for a token that may not be drawn.
        seed: One for all rows, or one per row.
        requests: The number of each row's request.
        positions: The position in its request of the token that is drawn: the number of tokens before it.
        temperature: Divides the logits; 0 takes the most likely token. One for all, or one per row.
        top_k: Keep the k most likely tokens; None, 0 or -1 for all. One for all, or one per row.
        top_p: Keep the most likely tokens whose probabilities reach p; None or 1 for all. One for all, or one per row.

    Returns:
        Tokens, their log-probabilities and what was kept.

    Raises:
        ArgumentError: If logits are not fp32 or a row has no number that is finite, or an option is out of range.

    Example:
        >>> logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
        >>> asked = dict(seed=7, temperature=0.8, top_p=0.9)
        >>> whole = isobit.sampling.sample(logits, requests=[4, 5, 6], positions=[9, 2, 2], **asked)
        >>> alone = isobit.sampling.sample(logits[1:2], requests=5, positions=2, **asked)
        >>> torch.equal(whole.tokens[1:2], alone.tokens), torch.equal(whole.logprobs[1:2], alone.logprobs)
        (True, True)
    """
    check_logits(logits)
    rows = len(logits)
    heat = per_row_temperature(temperature, rows).to(logits.device)
    greedy = heat == 0
    scaled = divide_by_temperature(logits, torch.where(greedy, 1.0, heat))
    kept = keep_most_likely(scaled, top_k, top_p)
    if bool(greedy.any()):
        kept &= ~greedy.unsqueeze(1) | only_first_of_largest(scaled)
    allowed = torch.where(kept, scaled, -torch.inf)
    number = uniform(seed, requests, positions, rows).to(logits.device)
    tokens = draw_by_mass(softmax(allowed), number)
    logprobs = log_softmax(allowed).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Drawn(tokens, logprobs, kept)


def divide_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return logits [rows, V] · (1 / temperature [rows]) in fp32: the arithmetic of isobit.linear_logprob."""
    return logits * (1.0 / temperature).unsqueeze(1)


def draw_by_mass(probabilities: Tensor, number: Tensor) -> Tensor:
    """Return the token whose share of [0, 1) has the number, with shares by ascending id.

    Probabilities are counted in whole multiples of 2^-40, whose sums have no order. A token below that is not drawn.
    """
    edges = (probabilities * float(MASS)).long().cumsum(-1)
    total = edges[:, -1:]
    at = (number.unsqueeze(1) * total.double()).long()
    return torch.searchsorted(edges, torch.minimum(at, total - 1), right=True).squeeze(1)


def only_first_of_largest(logits: Tensor) -> Tensor:
    """Return True at the largest of each row, at the lowest id of equal ones."""
    largest = logits == logits.amax(-1, keepdim=True)
    return largest & (largest.cumsum(-1) == 1)


def per_row_temperature(temperature: Number, rows: int) -> Tensor:
    """Return temperatures [rows] in fp32."""
    found = torch.as_tensor(temperature, dtype=torch.float32).reshape(-1).cpu()
    if len(found) not in (1, rows):
        raise wrong(f"temperature: one, or one for each of {rows} rows", temperature)
    check_temperature(found)
    return found.expand(rows)


def check_logits(logits: Tensor) -> None:
    """Raise unless each row has fp32 logits of which one is finite and none is NaN or +inf."""
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ArgumentError(
            expected="logits [rows, vocabulary] in fp32, as the head summed them",
            received=f"{list(logits.shape)} in {logits.dtype}",
            remedy="take the head's sums before they are rounded; logits[:, -1] of an enabled model are",
        )
    wrong_rows = ~logits.amax(-1).isfinite()  # the maximum of a row with a NaN is NaN
    if bool(wrong_rows.any()):
        at = int(wrong_rows.nonzero()[0])
        raise ArgumentError(
            expected="a finite logit in every row, and neither NaN nor +inf",
            received=f"row {at}: largest {float(logits[at].amax())}, {int(logits[at].isnan().sum())} NaN",
            remedy="look for the first module with a NaN: the model is broken before the sampler",
        )
