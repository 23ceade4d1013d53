"""Warn of rotary frequencies that were rounded: `model.to(torch.bfloat16)` casts buffers, too.

A checkpoint does not contain these buffers. Whoever loads it computes them in fp32, so that a model whose own were
rounded has other log-probabilities than the engine that loads its weights, and no digest of weights shows it.
"""

from __future__ import annotations

import warnings

import torch

from isobit.errors import RotaryWarning

NAME = "inv_freq"
MARK = (
    "_isobit_rounded_frequencies"  # on a module that was warned of, or whose rounding is accepted
)


def warn_of_rounded_frequencies(model: torch.nn.Module, name: str = "model") -> None:
    """Warn, once per module, of frequencies that are not fp32, by their names; `name` is what to call the model."""
    for path, module in model.named_modules():
        held = {key: module._buffers[key] for key in names_of_frequencies(module)}
        rounded = [k for k, v in held.items() if v is not None and v.dtype != torch.float32]
        if not rounded or MARK in module.__dict__:
            continue
        key = rounded[0]
        dtype = str(module._buffers[key].dtype)[6:]
        module.__dict__[MARK] = True
        place = f"{name}.{path}" if path else name
        warnings.warn(
            f"isobit: {place}.{key} is {dtype}, expected float32. model.to(dtype) rounds the "
            "rotary frequencies, which no checkpoint contains: an engine that loads the weights computes them in fp32, "
            "and its log-probabilities differ. Load the model by from_pretrained(..., dtype=...) or "
            f"from_config(..., dtype=...), or restore them before enabling: "
            f"{place} = type({place})(model.config)",
            RotaryWarning,
            stacklevel=3,
        )


def accept_rounded_frequencies(model: torch.nn.Module) -> None:
    """Do not warn of a model that is compared with itself alone."""
    for module in model.modules():
        if names_of_frequencies(module):
            module.__dict__[MARK] = True


def names_of_frequencies(module: torch.nn.Module) -> list[str]:
    """Return the buffers that are frequencies: one, or one for each kind of layer."""
    return [key for key in module._buffers if key.endswith(NAME) and "original" not in key]
