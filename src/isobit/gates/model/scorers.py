"""The two sides of the batch-layout gate: a model with isobit enabled, and stock."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from isobit.gates.model.batches import Batch
from isobit.integrations.transformers.scoring import logprobs
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.op import IGNORED


class Scorer(Protocol):
    """How one side computes log-probabilities and the loss."""

    name: str
    model: Any

    def logprobs(self, batch: Batch, columns: slice, cache: Any) -> Tensor:
        """Return log p of the token that follows each, [B, columns]."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the training loss."""

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return log p of tokens from the logits that `generate` saw."""


class IsobitScorer:
    """A model with isobit enabled, which computes the positions of padded samples itself."""

    name = "isobit"

    def __init__(self, model: Any) -> None:
        """Score with a model on which isobit is enabled."""
        self.model = model

    def logprobs(self, batch: Batch, columns: slice, cache: Any = None) -> Tensor:
        """Compute log p by `isobit.logprobs`."""
        return logprobs(
            self.model,
            batch.ids[:, columns],
            None if batch.mask is None else batch.mask[:, : columns.stop],
            batch.positions if batch.packed else None,
            targets=batch.targets()[:, columns],
            past_key_values=cache,
        )

    def loss(self, batch: Batch) -> Tensor:
        """Compute the loss by the model with labels."""
        found = self.model(
            batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions if batch.packed else None,
            labels=batch.labels(),
            use_cache=False,
        )
        return found.loss  # type: ignore[no-any-return]

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Compute log p by `isobit.log_softmax`."""
        return log_softmax(logits).gather(-1, tokens[..., None])[..., 0]


class StockScorer:
    """The model as transformers runs it, with the correct positions for padded samples."""

    name = "stock"

    def __init__(self, model: Any) -> None:
        """Score with a model of transformers."""
        self.model = model

    def logprobs(self, batch: Batch, columns: slice, cache: Any = None) -> Tensor:
        """Compute log p by log_softmax of the logits in fp32."""
        logits = self.model(
            batch.ids[:, columns],
            attention_mask=None if batch.mask is None else batch.mask[:, : columns.stop],
            position_ids=batch.positions[:, columns],
            past_key_values=cache,
            use_cache=cache is not None,
        ).logits
        targets = batch.targets()[:, columns]
        return self.of_logits(logits, targets.clamp_min(0)).masked_fill(targets == IGNORED, 0)

    def loss(self, batch: Batch) -> Tensor:
        """Compute the loss by the model with labels."""
        found = self.model(
            batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            labels=batch.labels(),
            use_cache=False,
        )
        return found.loss  # type: ignore[no-any-return]

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Compute log p by torch.log_softmax in fp32."""
        return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]
