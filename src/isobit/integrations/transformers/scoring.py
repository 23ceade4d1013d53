"""`isobit.logprobs` and `isobit.logprobs_and_entropy`: score tokens as the rollout did."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.adapters import inner_model
from isobit.integrations.transformers.forwards import (
    kind_of,
    layout_of,
    refuse_tied_share,
    require_head,
    run_checked,
)
from isobit.integrations.transformers.head import entropy_of, keep_of, logprobs_of
from isobit.integrations.transformers.layout import LAYOUT
from isobit.integrations.transformers.parts.lora import active_module
from isobit.integrations.transformers.state import require_state
from isobit.parallel.collectives.levels import Group
from isobit.parallel.data.loss_meter import LossMeter
from isobit.parallel.tensor.shard import tp_group_of
from isobit.sampling.support import Truncation


def logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    targets: Tensor | None = None,
    temperature: float = 1.0,
    support: Tensor | Truncation | None = None,
    **inputs: Any,
) -> Tensor:
    """Return the log-probability of each next token, with the same bits in rollout and in training.

    Args:
        model: An enabled causal language model.
        input_ids: Token ids, [B, T].
        attention_mask: 1 for tokens and 0 for padding, [B, past + T].
        position_ids: Positions, [B, T]; positions that restart at 0 separate packed samples.
        targets: Token ids to score, [B, T]; by default the token that follows in the same sample. -100 is skipped.
        temperature: Divides the logits.
        support: The ids that each target was drawn from, over which to normalise: [B, T, n] filled up with -1, or
            booleans [B, T, V], as `isobit.sampling.sample` kept them; or a `isobit.sampling.Truncation`, which keeps
            them again from the same logits. By default the whole vocabulary.
        **inputs: Further arguments of the model, such as past_key_values.

    Returns:
        log p of targets[b, t] given the tokens up to t, [B, T] in fp32; +0 where the target is -100.

    Raises:
        UnsupportedError: If the model is not enabled, or its modules changed since.
        ArgumentError: If masks or positions cannot be read as samples, or a target is not in its support.

    Example:
        >>> scores = isobit.logprobs(model, ids)  # doctest: +SKIP
    """
    asked = (targets, temperature, support)
    return score(model, input_ids, attention_mask, position_ids, asked, False, inputs)[0]


def logprobs_and_entropy(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    targets: Tensor | None = None,
    temperature: float = 1.0,
    support: Tensor | Truncation | None = None,
    **inputs: Any,
) -> tuple[Tensor, Tensor]:
    """Return `isobit.logprobs`, and the entropy of the distribution that each is taken from.

    Args:
        model: An enabled causal language model.
        input_ids: Token ids, [B, T].
        attention_mask: As for isobit.logprobs.
        position_ids: As for isobit.logprobs.
        targets: As for isobit.logprobs.
        temperature: As for isobit.logprobs.
        support: As for isobit.logprobs.
        **inputs: Further arguments of the model.

    Returns:
        Log-probabilities and entropies, [B, T] in fp32. An entropy has no gradient, and does not depend on the batch;
        +0 where the target is -100.

    Raises:
        UnsupportedError: As isobit.logprobs does.
        ArgumentError: As isobit.logprobs does.

    Example:
        >>> scores, entropies = isobit.logprobs_and_entropy(model, ids)  # doctest: +SKIP
    """
    asked = (targets, temperature, support)
    found, entropy = score(model, input_ids, attention_mask, position_ids, asked, True, inputs)
    assert entropy is not None
    return found, entropy


def score(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    asked: tuple[Tensor | None, float, Tensor | Truncation | None],
    want_entropy: bool,
    inputs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities, and entropies if they are wanted."""
    model = inner_model(model)
    state = require_state(model)
    if state.head is None or not state.head.is_language_model:
        raise ArgumentError(
            expected="a model with a language-model head",
            received=type(model).__name__,
            remedy="pass the model that has the language-model head",
        )
    causal: Any = model
    head = active_module(causal.lm_head)
    targets, temperature, support = asked
    temperature = temperature * require_head(state).divisor(model)
    softcap = require_head(state).softcap(model)
    refuse_split_support(causal, support, want_entropy)
    past = inputs.get("past_key_values")
    layout = layout_of(input_ids, None, attention_mask, position_ids, past, inputs)
    inputs[LAYOUT] = layout
    wanted = layout.next_of(input_ids) if targets is None else targets
    cached = inputs.setdefault("use_cache", past is not None)

    def run() -> tuple[Tensor, Tensor | None]:
        hidden = causal.model(input_ids=input_ids, return_dict=True, **inputs).last_hidden_state
        refuse_tied_share(causal)
        kept = keep_of(hidden, head, support, temperature, softcap)
        found = logprobs_of(hidden, head, layout, wanted, temperature, kept, softcap)
        if not want_entropy:
            return found, None
        return found, entropy_of(hidden, head, wanted, temperature, kept, softcap)

    how = ("logprobs", support is not None, want_entropy, softcap is not None)
    kind = (*kind_of(model, layout, past, cached), *how)
    return run_checked(state, model, kind, run, calls_head=False, calls_model=False)


def refuse_split_support(
    model: Any, support: Tensor | Truncation | None, want_entropy: bool
) -> None:
    """Raise where the vocabulary is split over ranks: supports and entropies need the whole row."""
    if (support is not None or want_entropy) and tp_group_of(model.lm_head) is not None:
        raise UnsupportedError(
            expected="a head that is not split over ranks, for support= and for entropies",
            received="a vocabulary that isobit.integrations.transformers.shard split",
            remedy="score the whole vocabulary (support=None), or unshard the model",
        )
    if support is not None and not isinstance(support, (torch.Tensor, Truncation)):
        raise ArgumentError(
            expected="support as a tensor of ids or booleans, or an isobit.sampling.Truncation",
            received=type(support).__name__,
            remedy="pass Drawn.support of isobit.sampling.sample, or Truncation(top_k=…, top_p=…)",
        )


# The perplexity of a model by an exact sum: one number for every batch size and number of ranks.

IGNORED = -100


@torch.no_grad()
def perplexity(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, group: Group = None
) -> float:
    """Return exp(−Σ log p / count) over all tokens that follow another one (FALSIFY-ALBOR-009).

    A token's log-probability does not depend on its batch, and the sum is exact, so the result does not depend on how
    samples are ordered, batched, padded or divided over ranks.

    Args:
        model: An enabled causal language model.
        batches: Pairs (input_ids, attention_mask), both [B, T], of whole samples; on each rank its own.
        group: The ranks that have a part of the samples; None is the default group.

    Returns:
        The perplexity, in fp64.

    Raises:
        ArgumentError: There is no token to score.
    """
    meter = LossMeter()
    for ids, mask in batches:
        targets = torch.full_like(ids, IGNORED)
        follows = mask[:, 1:].bool() & mask[:, :-1].bool()
        targets[:, :-1] = torch.where(follows, ids[:, 1:], IGNORED)
        found = logprobs(model, ids, mask, targets=targets)
        meter.add(-found, int(follows.sum()))
    return math.exp(float(meter.value(group)))
