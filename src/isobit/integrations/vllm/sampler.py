"""Draw tokens by a key, so that a draw depends on (seed, request, position) and the logits, and not on the batch.

The draw is that of isobit.sampling.sample, as in transformers' generate() with isobit.KeyedSampling. Log-probabilities
are those of the policy that sampled: after temperature, top-k and top-p, over the tokens that could be drawn.
A greedy request has those of the model at temperature 1, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.integrations.vllm.refusals import GREEDY, REQUEST, check_request
from isobit.ops.log_softmax.op import log_softmax
from isobit.sampling.drawing import divide_by_temperature, sample


@dataclass(frozen=True)
class Draw:
    """How one row is sampled."""

    temperature: float  # 0 for greedy
    top_k: int  # 0 for all
    top_p: float  # 1 for all
    seed: int
    request: int
    position: int  # tokens before the drawn one


def read_draw(params: Any, position: int) -> Draw:
    """Return how a request is sampled at a position, from vLLM's SamplingParams; raise if it cannot be scored."""
    check_request(params)
    if params.temperature < GREEDY:
        return Draw(0.0, 0, 1.0, 0, 0, position)
    number = (params.extra_args or {}).get(REQUEST, 0)
    top_k = max(params.top_k, 0)
    return Draw(params.temperature, top_k, params.top_p, params.seed, number, position)


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Return the drawn token of each row, and the logits of the policy that drew it; −inf outside its support.

    Args:
        logits: [rows, V] in fp32.
        draws: One per row.
    """
    drawn = sample(
        logits,
        seed=[draw.seed for draw in draws],
        requests=[draw.request for draw in draws],
        positions=[draw.position for draw in draws],
        temperature=[draw.temperature for draw in draws],
        top_k=[draw.top_k for draw in draws],
        top_p=[draw.top_p for draw in draws],
    )
    greedy = torch.tensor([[draw.temperature == 0] for draw in draws])
    heat = torch.tensor([draw.temperature or 1.0 for draw in draws], dtype=torch.float32)
    scaled = divide_by_temperature(logits, heat)
    return drawn.tokens, torch.where(drawn.kept | greedy, scaled, -torch.inf)


def policy_logprobs(policy: Tensor) -> Tensor:
    """Return log-probabilities [rows, V] in fp32."""
    return log_softmax(policy.float())
