"""The inputs of a model: samples along the first dimension, tokens along the second."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from isobit.auditing.replay.call import without_rows
from isobit.errors import ArgumentError

Batch = Tensor | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    model: nn.Module
    args: tuple[Any, ...]
    named: dict[str, Any]

    def run(self) -> Any:
        """Call the model."""
        return self.model(*self.args, **self.named)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the inputs."""
        return [v for v in (*self.args, *self.named.values()) if isinstance(v, Tensor)]

    @property
    def tokens(self) -> Tensor | None:
        """The token ids, if the model reads tokens."""
        found = self.named.get("input_ids", self.args[0] if self.args else None)
        whole = isinstance(found, Tensor) and found.dtype == torch.int64 and found.dim() == 2
        return found if whole else None

    @property
    def samples(self) -> int:
        """The number of samples: the first dimension of the first tensor."""
        return int(self.tensors[0].shape[0])

    @property
    def width(self) -> int | None:
        """The number of tokens of a sample, or None if the inputs have no second dimension of tokens."""
        mask = self.mask
        if mask is not None:
            return int(mask.shape[1])
        first = self.tensors[0]
        return int(first.shape[1]) if first.dim() in (2, 3) else None

    @property
    def mask(self) -> Tensor | None:
        """The attention mask [samples, tokens], if there is one."""
        found = self.named.get("attention_mask")
        return found if isinstance(found, Tensor) and found.dim() == 2 else None

    def map(self, change: Any) -> Inputs:
        """Return inputs with every tensor changed."""

        def one(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return replace(
            self,
            args=tuple(one(v) for v in self.args),
            named={name: one(v) for name, v in self.named.items()},
        )

    def sample(self, index: int) -> Inputs:
        """Return one sample, with its padding."""
        count = self.samples
        return self.map(
            lambda t: t[index : index + 1].clone() if t.dim() and len(t) == count else t
        )

    def positions(self, index: Tensor) -> Inputs:
        """Return these tokens of every sample."""
        width = self.width
        return self.map(
            lambda t: (
                t.index_select(1, index.to(t.device)) if t.dim() > 1 and t.shape[1] == width else t
            )
        )

    def with_named(self, **more: Any) -> Inputs:
        """Return inputs with more keywords."""
        return replace(self, named={**self.named, **more})

    def accepts(self, name: str) -> bool:
        """Return whether the model's forward takes a keyword."""
        known = inspect.signature(self.model.forward).parameters
        return name in known or any(p.kind is p.VAR_KEYWORD for p in known.values())

    def marked(self, dim: int, labels: Tensor) -> tuple[tuple[Tensor, int, Tensor], ...]:
        """Return every input tensor that has these labels along a dimension."""
        return tuple(
            (t, dim, labels) for t in self.tensors if t.dim() > dim and t.shape[dim] == len(labels)
        )

    def __str__(self) -> str:
        tokens = f" of {self.width} tokens" if self.width and self.tokens is not None else ""
        return f"{self.samples} sample{'s' if self.samples != 1 else ''}{tokens}"


def as_inputs(model: nn.Module, batch: Batch, effect: str | None = None) -> Inputs:
    """Return the inputs of a batch: one tensor, keywords by name, or arguments in order.

    A model of transformers gets no cache and no labels: the loss that it would return is one number over all samples,
    so that none of it can be compared with a sample's. It keeps its labels where the effect is measured on the loss.
    """
    if isinstance(batch, Tensor):
        made = Inputs(model, (batch,), {})
    elif isinstance(batch, Mapping):
        made = Inputs(model, (), dict(batch))
    else:
        made = Inputs(model, tuple(batch), {})
    if not made.tensors or not made.tensors[0].dim():
        raise ArgumentError(
            expected="a batch with at least one tensor whose first dimension is the samples",
            received=type(batch).__name__,
            remedy="pass a tensor, a dict of tensors as for model(**batch), or a tuple of tensors",
        )
    odd = without_rows(made.tensors)
    if odd:
        raise ArgumentError(
            expected="inputs with rows, one per sample",
            received=odd,
            remedy="pass dense tensors, and make sparse or nested ones of them in the model",
        )
    config = getattr(model, "config", None)
    if (
        getattr(config, "use_cache", False)
        and "use_cache" not in made.named
        and made.accepts("use_cache")
    ):
        made = made.with_named(use_cache=False)
    if config is not None and effect != "loss" and not getattr(config, "is_encoder_decoder", False):
        made = replace(made, named={k: v for k, v in made.named.items() if k != "labels"})
    return made.map(Tensor.clone)  # a model may write to its inputs
