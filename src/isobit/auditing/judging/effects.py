"""Measure how far the results of two runs differ: log-probabilities, or any tensor that the model returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.auditing.records import Effect
from isobit.auditing.replay.call import without_rows
from isobit.bits import as_integers
from isobit.errors import ArgumentError

LOGPROBS = "log-probabilities"
DEEPEST = 100  # containers in each other
CLIP = (0.8, 1.2)  # outside of it a ratio of probabilities is clipped by PPO and GRPO


@dataclass(frozen=True)
class Quantity:
    """What is measured of one run: numbers, and the likeliest token of each position if there are any."""

    name: str
    numbers: Tensor
    likeliest: Tensor | None = None


def outputs_of(out: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's output by name; numbers and arrays become tensors.

    Containers are mappings, dataclasses, tuples and lists; what an object of another class holds is not looked at.

    Raises:
        ArgumentError: A tensor has no rows (it is sparse or nested), is in a set, which has no order, or in more than
            `DEEPEST` containers.
    """
    found: dict[str, Tensor] = {}
    gather(out, "", found, [])
    return found


def gather(out: Any, path: str, found: dict[str, Tensor], above: list[Any]) -> None:
    """Add the tensors of an output, or of a part of it, to those that were found.

    Args:
        out: The output or a part of it.
        path: Where the part is, such as `hidden_states.1`; "" for the whole.
        found: What was found so far, by path.
        above: The containers that the part is in.
    """
    if any(out is one for one in above):
        return  # it contains itself
    if len(above) > DEEPEST:
        raise ArgumentError(
            expected=f"outputs in at most {DEEPEST} containers, one in another",
            received=f"more, at {path[:40]}…",
            remedy="audit a module that wraps the model and returns the tensors themselves",
        )
    if isinstance(out, (bool, int, float, complex, np.ndarray)):
        out = torch.as_tensor(out)
    if isinstance(out, Tensor):
        found[unused(path or "output", found)] = with_rows(out, path)
        return
    for name, value in parts_of(out, path):
        if name != "past_key_values":
            gather(value, f"{path}.{name}" if path else name, found, [*above, out])


def parts_of(out: Any, path: str) -> list[tuple[str, Any]]:
    """Return the names and values of a container's parts; none of anything else."""
    if isinstance(out, Mapping):
        return [(str(name), value) for name, value in out.items()]
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return [(field.name, getattr(out, field.name)) for field in dataclasses.fields(out)]
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return list(zip(out._fields, out, strict=True))
    if isinstance(out, (tuple, list)):
        return [(str(at), value) for at, value in enumerate(out)]
    if isinstance(out, (set, frozenset)) and any(isinstance(one, Tensor) for one in out):
        raise ArgumentError(
            expected="outputs in a tuple, list, dictionary or dataclass",
            received=f"a set of tensors{f' as {path}' if path else ''}, which has no order",
            remedy="return a list from the model, or audit a module that wraps it and does",
        )
    return []


def unused(name: str, found: Mapping[str, Tensor]) -> str:
    """Return a name that no other output has: 1 and "1" may both be keys."""
    number = 2
    unique = name
    while unique in found:
        unique, number = f"{name} ({number})", number + 1
    return unique


def with_rows(tensor: Tensor, path: str) -> Tensor:
    """Return a tensor of an output; raise ArgumentError if it has no rows to compare."""
    odd = without_rows([tensor])
    if not odd:
        return tensor
    dense = "torch.nested.to_padded_tensor(…)" if tensor.is_nested else ".to_dense()"
    raise ArgumentError(
        expected="outputs with rows, one per sample",
        received=f"{odd}{f' as {path}' if path else ''}",
        remedy=f"audit a module that wraps the model and returns {dense} of it",
    )


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
