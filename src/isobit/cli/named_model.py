"""Load the model that `isobit gate model --model` names: one of the gates' own, a checkpoint folder, or a factory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isobit.auditing.subjects import from_transformers
from isobit.cli.named_code import load_module
from isobit.errors import ArgumentError, in_one_line
from isobit.gates.model.models import MODELS, build_model
from isobit.integrations.transformers.package import without_bars


def load_model(
    name: str, dtype: torch.dtype | None, device: torch.device, seed: int, trust: list[str]
) -> tuple[Any, Any]:
    """Return a model in eval mode and, if there is one, its tokenizer.

    Args:
        name: A name of `isobit.gates.model.models.MODELS`, a folder or hub id that transformers loads, or
            FILE.py:function or package.module:function, which returns a model or (model, batch).
        dtype: Of the parameters; None is the model's own, or fp32 for the gates' models.
        device: Where it runs.
        seed: Of the weights of the gates' models.
        trust: Packages that may be imported from the folder of a factory.

    Raises:
        ArgumentError: If there is no such model, or a factory raises or returns something else.
    """
    if name in MODELS:
        return build_model(name, dtype or torch.float32, seed).to(device), None
    if ":" in name:
        model = call_factory(name, trust)
        return (model.to(device) if dtype is None else model.to(device, dtype)).eval(), None
    with without_bars():
        return from_transformers(name, dtype, str(device))


def call_factory(name: str, trust: list[str]) -> nn.Module:
    """Return the model that a factory makes; of (model, batch), as `isobit audit` expects, the model."""
    module, _, attribute = name.rpartition(":")
    loaded = load_module(module, trust)
    factory = getattr(loaded, attribute, None)
    if not callable(factory):
        raise ArgumentError(
            expected="FILE.py:function or package.module:function that returns a model",
            received=f"{name}: {module} has no function {attribute}",
            remedy="name a function that needs no arguments",
        )
    try:
        made = factory()
    except (Exception, SystemExit) as error:  # a factory may raise anything
        raise ArgumentError(
            expected=f"a model from {name}()",
            received=f"{type(error).__name__}: {in_one_line(error)}",
            remedy="the function must return a model when it is called without arguments",
        ) from error
    model = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            expected=f"{name}() to return a model, or (model, batch)",
            received=type(made).__name__,
            remedy="return a torch.nn.Module",
        )
    return model
