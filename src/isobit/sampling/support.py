"""Which tokens may be drawn: top-k and top-p with one rule for ties, so that rollout and trainer keep the same ids.

[Note: ties] Tokens are ranked by their logit, larger first, and equal logits by their id, lower first. top-k keeps
exactly the k first; top-p keeps the fewest of these whose probability reaches p. Probabilities are counted in whole
multiples of 2^-40, so that their sums have no order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.softmax.op import softmax

MASS = 2**40

Number = float | Sequence[float] | Tensor | None


@dataclass(frozen=True)
class Truncation:
    """A support that is computed from the logits: top-k, then top-p of what is kept. See [Note: ties].

    Args:
        top_k: Keep the k most likely tokens; None, 0 or -1 for all.
        top_p: Keep the most likely tokens whose probabilities reach p; None or 1 for all.

    Example:
        >>> kept = isobit.sampling.Truncation(top_k=2).keep(torch.tensor([[1.0, 3.0, 3.0, 3.0]]))
        >>> kept.tolist()
        [[False, True, True, False]]
    """

    top_k: int | None = None
    top_p: float | None = None

    def keep(self, logits: Tensor) -> Tensor:
        """Return which tokens are kept, [rows, vocabulary], of logits in fp32 that the temperature has divided."""
        return keep_most_likely(logits, self.top_k, self.top_p)


def keep_most_likely(logits: Tensor, top_k: Number, top_p: Number) -> Tensor:
    """Return which tokens may be drawn, [rows, vocabulary]; never those at -inf. See [Note: ties].

    Args:
        logits: Shape [rows, vocabulary] in fp32, divided by the temperature.
        top_k: For all rows, or one per row; None, 0 or -1 keeps all.
        top_p: For all rows, or one per row; None or 1 keeps all.
    """
    rows, width = logits.shape
    kept = logits > -torch.inf
    if not rows:
        return kept
    counts = as_counts(top_k, rows, width)
    if counts is not None:
        kept &= keep_first(logits, counts.to(logits.device))
    masses = as_masses(top_p, rows)
    if masses is not None:
        allowed = torch.where(kept, logits, -torch.inf)
        order = allowed.argsort(dim=-1, descending=True, stable=True)
        mass = (softmax(allowed) * float(MASS)).long().gather(-1, order)
        before = mass.cumsum(-1) - mass  # whole numbers: exact in any order
        first = before < masses.to(logits.device).unsqueeze(1)
        kept &= torch.zeros_like(kept).scatter(-1, order, first)
    return kept


def keep_first(logits: Tensor, counts: Tensor) -> Tensor:
    """Return the `counts` largest of each row; of equal ones at the edge those with the lowest ids."""
    largest = logits.topk(int(counts.max()), dim=-1).values
    edge = largest.gather(-1, counts.unsqueeze(1) - 1)
    above, level = logits > edge, logits == edge
    room = counts.unsqueeze(1) - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


def as_counts(top_k: Number, rows: int, width: int) -> Tensor | None:
    """Return how many tokens each row keeps, [rows], or None if all keep all."""
    if top_k is None:
        return None
    given = torch.as_tensor(top_k)
    if given.is_floating_point() or given.numel() not in (1, rows) or bool((given < -1).any()):
        raise wrong("top_k of at least 1, or None, 0 or -1 for all; one, or one per row", top_k)
    found = given.reshape(-1).to("cpu", torch.int64).expand(rows)
    found = torch.where(found < 1, width, found).clamp(max=width)
    return None if bool((found == width).all()) else found


def as_masses(top_p: Number, rows: int) -> Tensor | None:
    """Return the mass that each row keeps, [rows], in multiples of 2^-40, or None if all keep all."""
    if top_p is None:
        return None
    given = torch.as_tensor(top_p, dtype=torch.float64).reshape(-1).cpu()
    if len(given) not in (1, rows) or not bool(((given > 0) & (given <= 1)).all()):
        raise wrong("top_p in (0, 1], or None; one, or one per row", top_p)
    if bool((given == 1).all()):
        return None
    # A row that keeps all must also keep what no whole multiple is left for.
    whole = torch.where(given == 1, float(2 * MASS), given * MASS)
    return whole.long().clamp(min=1).expand(rows)


def support_ids(kept: Tensor) -> Tensor:
    """Return the ids that are kept, ascending, filled up with -1: what `support=` of isobit.logprobs takes.

    Args:
        kept: Shape [..., vocabulary], True for each token that could be drawn.

    Returns:
        Tensor [..., most kept in any row] in int64.

    Example:
        >>> isobit.sampling.support_ids(torch.tensor([[True, False, True], [False, True, False]]))
        tensor([[ 0,  2],
                [ 1, -1]])
    """
    width = int(kept.sum(-1).max()) if kept.numel() else 0
    ids = torch.where(kept, torch.arange(kept.shape[-1], device=kept.device), kept.shape[-1])
    found = ids.sort(dim=-1).values[..., :width]
    return torch.where(found == kept.shape[-1], -1, found)


def wrong(expected: str, received: object) -> ArgumentError:
    """Return the error of an option out of range."""
    return ArgumentError(expected=expected, received=repr(received), remedy="pass one that is")


def check_temperature(temperature: Tensor) -> None:
    """Raise unless every temperature is 0 or a positive finite number."""
    if not bool(((temperature >= 0) & (temperature < math.inf)).all()):
        raise wrong("temperature of 0 (greedy) or above", temperature.tolist())
