"""Draw tokens by a key, so that a draw depends on (seed, position) and the logits, and not on the batch.

The draw is that of isobit.KeyedSampling: the same seed, position and logits give the same token in vLLM and in
transformers' generate(). The log-probabilities are those of the policy that sampled: after temperature, top-k and top-p,
normalized over the tokens that could be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.integrations.transformers.sampling import gumbel_noise, keep_most_likely
from isobit.ops.log_softmax.op import log_softmax


@dataclass(frozen=True)
class Draw:
    """How one row is sampled."""

    temperature: float  # 0 for greedy
    top_k: int | None
    top_p: float | None
    seed: int
    position: int  # tokens before the drawn one


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Return the drawn token of each row, and the logits of the policy that drew it; −inf outside its support.

    Args:
        logits: [rows, V] in fp32.
        draws: One per row.
    """
    policy = logits.clone()
    tokens = torch.empty(len(draws), dtype=torch.int64)
    for row, draw in enumerate(draws):
        if draw.temperature == 0:
            tokens[row] = lowest_largest(logits[row])
            continue
        scores = logits[row : row + 1].double() / draw.temperature
        kept = keep_most_likely(scores, draw.top_k, draw.top_p)
        noise = gumbel_noise(
            draw.seed, torch.zeros(1, dtype=torch.int64), torch.tensor([draw.position]), scores.shape[1]
        )
        tokens[row] = lowest_largest(torch.where(kept, scores + noise, -torch.inf)[0])
        # As isobit.linear_logprob applies a temperature: by one product in fp32.
        inverse = torch.tensor(1.0) / torch.tensor(draw.temperature, dtype=torch.float32)
        policy[row] = torch.where(kept[0], logits[row] * inverse, -torch.inf)
    return tokens, policy


def lowest_largest(scores: Tensor) -> Tensor:
    """Return the lowest index of the largest score, [V]; a NaN counts as larger than any number."""
    return scores.argmax()


def policy_logprobs(policy: Tensor) -> Tensor:
    """Return log-probabilities [rows, V] in fp32."""
    return log_softmax(policy.float())
