"""Composites run their own code, with the rotation of queries and keys, and torch.sigmoid, re-bound to isobit's."""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.layout import LAYOUT, in_force
from isobit.integrations.transformers.parts.digests import ROTATIONS
from isobit.integrations.transformers.parts.part import plain_class
from isobit.integrations.transformers.parts.probing import probe_rotation
from isobit.integrations.transformers.parts.rotary import rotation
from isobit.integrations.transformers.parts.source import digest_of_function, function_of
from isobit.integrations.transformers.residual import settle
from isobit.ops.delta_rule.gates import sigmoid_gate


def forward_composite(module: nn.Module, *given: Any, **named: Any) -> Any:
    """Run a module's own code, with its rotation re-bound."""
    return rebound(type(module))(module, *given, **named)


def forward_layer(module: nn.Module, *given: Any, **named: Any) -> Any:
    """Run a decoder layer's own code.

    A checkpointed layer runs again in backward, where only its keywords know the layout. Additions of the residual
    stream are the layer's own; NaNs of its output, and of the gradient of its input, get the same bits here.
    """
    layout = named.get(LAYOUT)
    forward = rebound(type(module))
    if layout is None:
        return forward(module, *given, **named)
    with in_force(layout):
        if given and isinstance(given[0], Tensor):
            given = settle(given[0], forward=False), *given[1:]
        output = forward(module, *given, **named)
        if isinstance(output, Tensor):
            return settle(output, forward=True)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return settle(output[0], forward=True), *output[1:]
        return output


def rebound(kind: Any) -> Any:
    """Return a class's forward, as it is now, as a function whose rotations are isobit's."""
    return _rebound(kind, kind.forward)


@lru_cache(maxsize=1024)
def _rebound(kind: Any, forward: Any) -> Any:
    return rebound_function(function_of(plain_class(kind)))


@lru_cache(maxsize=1024)
def rebound_function(function: Any) -> Any:
    """Return a function with the same code, in whose globals the rotations are isobit's."""
    ours: dict[str, Any] = {
        name: rotation(found.style) for name, found in rotations_of(function).items()
    }
    if {"torch", "sigmoid"} <= set(function.__code__.co_names):
        ours["torch"] = Torch()
    if not ours:
        return function
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **ours},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class Torch:
    """The name `torch` of a composite that gates by torch.sigmoid, whose vector body and tail have different bits."""

    sigmoid = staticmethod(sigmoid_gate)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@dataclass(frozen=True)
class Rotation:
    """How a composite rotates queries and keys, and where that was recognised."""

    style: str
    found: str
    shipped: bool


@lru_cache(maxsize=1024)
def rotations_of(function: Any) -> dict[str, Rotation]:
    """Return the rotations that a forward names."""
    found = {}
    for name in function.__code__.co_names:
        other = function.__globals__.get(name)
        if name.startswith("apply_rotary") and callable(other):
            found[name] = find_rotation(inspect.unwrap(other), function)
    return found


def find_rotation(function: Any, caller: Any) -> Rotation:
    """Recognise a rotation by its source, else by what it computes; raise if it is none that is known."""
    digest = digest_of_function(function)
    if digest in ROTATIONS:
        path, style = ROTATIONS[digest]
        return Rotation(style, f"source of {path}", True)
    probed = probe_rotation(function)
    if probed is not None:
        return Rotation(probed, "probed", False)
    raise UnsupportedError(
        expected="a rotation of queries and keys by halves, by pairs, or by pairs to halves",
        received=f"{function.__module__}.{function.__qualname__} (digest {digest}), which {caller.__qualname__} calls "
        "and which computes none of these",
        remedy="isobit.rotary rotates halves; write the rotation with it, as docs/how-to/own-model.md shows",
    )
