"""Measure how far the results of two runs differ: log-probabilities, or any tensor that the model returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.audit_records import Effect
from isobit.bits import as_integers
from isobit.errors import ArgumentError

LOGPROBS = "log-probabilities"
CLIP = (0.8, 1.2)  # outside of it a ratio of probabilities is clipped by PPO and GRPO


@dataclass(frozen=True)
class Quantity:
    """What is measured of one run: numbers, and the likeliest token of each position if there are any."""

    name: str
    numbers: Tensor
    likeliest: Tensor | None = None


def outputs_of(out: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's output by name; numbers and arrays become tensors."""
    if isinstance(out, Tensor):
        return {"output": out}
    if isinstance(out, (bool, int, float, complex, np.ndarray)):
        return {"output": torch.as_tensor(out)}
    if isinstance(out, Mapping):
        items = list(out.items())
    elif dataclasses.is_dataclass(out) and not isinstance(out, type):
        items = [(field.name, getattr(out, field.name)) for field in dataclasses.fields(out)]
    elif isinstance(out, (tuple, list)):
        items = [(str(at), value) for at, value in enumerate(out)]
    else:
        items = []
    found: dict[str, Tensor] = {}
    for name, value in items:
        if name == "past_key_values":
            continue
        for inner, tensor in outputs_of(value).items():
            found[name if inner == "output" else f"{name}.{inner}"] = tensor
    return found


QUANTITIES = (
    "logp",
    "loss",
    "grad",
)  # what an effect can be measured on, besides an output by its name


def check_effect(effect: str | None, outputs: Mapping[str, Tensor]) -> None:
    """Raise ArgumentError for an output that the model does not return."""
    needed = {"logp": "logits", "loss": "loss"}.get(effect or "", effect)
    if effect not in (None, "grad") and needed not in outputs:
        raise ArgumentError(
            expected=f"effect: {', '.join(QUANTITIES)}, or an output of the model ({', '.join(outputs)})",
            received=effect,
            remedy="leave it out, or name one of these",
        )


def choose(outputs: Mapping[str, Tensor], effect: str | None) -> str:
    """Return the name of the tensor on which the effect is measured."""
    if effect is not None and effect in outputs:
        return effect
    if "logits" in outputs:
        return "logits"
    return next((name for name, tensor in outputs.items() if tensor.is_floating_point()), "")


def quantity_of(rows: Tensor, name: str, tokens: Tensor | None) -> Quantity:
    """Return the log-probabilities of the tokens that follow, or the numbers themselves."""
    shape = None if tokens is None else tokens.shape
    if name != "logits" or tokens is None or rows.dim() != 3 or shape != rows.shape[:2]:
        return Quantity(name, rows.detach().double().reshape(-1).cpu())
    logits = rows.detach().float()
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None].to(rows.device))
    return Quantity(
        LOGPROBS, chosen[..., 0].double().reshape(-1).cpu(), logits.argmax(-1).reshape(-1).cpu()
    )


def measure(run: Quantity, variant: Quantity) -> Effect:
    """Return how far two results differ."""
    apart = run.numbers - variant.numbers
    differ = as_integers(run.numbers) != as_integers(variant.numbers)
    largest = float(apart.abs().nan_to_num(nan=float("inf")).max()) if len(apart) else 0.0
    effect = Effect(run.name, len(apart), int(differ.sum()), largest)
    if run.likeliest is None or variant.likeliest is None:
        return effect
    ratio = apart.exp()
    outside = ((ratio < CLIP[0]) | (ratio > CLIP[1])).double()
    return dataclasses.replace(
        effect,
        k3=float((torch.expm1(apart) - apart).mean()) if len(apart) else 0.0,
        flips=int((run.likeliest != variant.likeliest).sum()),
        positions=len(run.likeliest),
        outside=float(outside.mean()) if len(apart) else 0.0,
    )
