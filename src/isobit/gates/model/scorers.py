"""The two that are put through the gate: an enabled model, and stock with the same inputs."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

import isobit
from isobit.gates.model.fixture import Batch
from isobit.integrations.transformers.forwards import logprobs
from isobit.ops.logprob.op import IGNORED


class Scorer(Protocol):
    """How one side turns inputs into log-probabilities and a loss."""

    name: str
    model: Any

    def logprobs(self, batch: Batch, columns: slice, cache: Any) -> Tensor:
        """[B, columns]: log p of the token that follows each."""

    def loss(self, batch: Batch) -> Tensor:
        """The training loss."""

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """log p of tokens, from the logits that `generate` saw."""


class Ordered:
    """An enabled model; positions of padded samples are left to it."""

    name = "isobit"

    def __init__(self, model: Any) -> None:
        self.model = model

    def logprobs(self, batch: Batch, columns: slice, cache: Any = None) -> Tensor:
        """By `isobit.logprobs`."""
        return logprobs(
            self.model,
            batch.ids[:, columns],
            None if batch.mask is None else batch.mask[:, : columns.stop],
            batch.positions if batch.packed else None,
            targets=batch.targets()[:, columns],
            past_key_values=cache,
        )

    def loss(self, batch: Batch) -> Tensor:
        """By the model, with labels."""
        found = self.model(
            batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions if batch.packed else None,
            labels=batch.labels(),
            use_cache=False,
        )
        return found.loss  # type: ignore[no-any-return]

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """By `isobit.log_softmax`."""
        return isobit.log_softmax(logits).gather(-1, tokens[..., None])[..., 0]


class Stock:
    """The same model as transformers runs it, with right positions for padded samples."""

    name = "stock"

    def __init__(self, model: Any) -> None:
        self.model = model

    def logprobs(self, batch: Batch, columns: slice, cache: Any = None) -> Tensor:
        """By log_softmax of the logits in fp32."""
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
        """By the model, with labels."""
        found = self.model(
            batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            labels=batch.labels(),
            use_cache=False,
        )
        return found.loss  # type: ignore[no-any-return]

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """By torch.log_softmax in fp32."""
        return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]
