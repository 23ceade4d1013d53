"""Dropout in an enabled model: masks by key, with the samples and positions of the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.layout import Layout
from isobit.sampling.dropout import drop, dropout_key_in_force, row_keys

KEYS = "dropout keys"  # of the rows of a layout


def drop_by_layout(layout: Layout, x: Tensor, p: float, module: str) -> Tensor:
    """Drop elements of x [B, T, C] by (seed, step, sample, position, module, channel).

    The keys of the rows are made at the first call of a layout. A layer that is recomputed in backward, outside of the
    `dropout_key` block, has the layout of its forward and so the same masks.
    """
    held = layout.known_places
    if KEYS not in held:
        held[KEYS] = keys_of(layout, module, p).to(x.device)  # type: ignore[assignment]
    return drop(x, p, held[KEYS], module)  # type: ignore[arg-type]


def keys_of(layout: Layout, module: str, p: float) -> Tensor:
    """Return the keys of all rows of a layout, or raise if the step or the samples' numbers are not known."""
    key = dropout_key_in_force()
    if key is None:
        raise UnsupportedError(
            expected="the seed and the step of a dropout mask, which depends on them, on the sample and its position",
            received=f"dropout of {p} in training at {module}, and no key",
            remedy="train with isobit.integrations.transformers.OrderedTrainer, or put "
            "`with isobit.sampling.dropout_key(seed=0, step=step):` around each forward; or set the dropout to 0, "
            "lora_dropout=0 in LoraConfig",
        )
    samples, positions = number_rows(layout, key.first_sample())
    return row_keys(key.seed, key.step, samples, positions, samples.numel())


def number_rows(layout: Layout, first: int) -> tuple[Tensor, Tensor]:
    """Return of each row of a call its sample, counted from `first`, and its position in it; -1 for padding."""
    batch, width = layout.positions.shape
    if layout.samples is None or layout.keys is None:
        rows = torch.arange(batch * width)
        return first + rows // width, rows % width + layout.key_rows - width
    samples = torch.full((batch * width,), -1)
    positions = torch.full((batch * width,), -1)
    for at, ((start, length), (_, known)) in enumerate(
        zip(layout.samples.spans, layout.keys.spans, strict=True)
    ):
        samples[start : start + length] = first + at
        positions[start : start + length] = torch.arange(known - length, known)
    return samples, positions
