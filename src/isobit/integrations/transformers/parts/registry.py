"""Classes that the user registered, and the functions that compute them."""

from __future__ import annotations

from typing import Any

from torch import nn

from isobit.integrations.transformers.parts.part import Part

REGISTERED: dict[type, Any] = {}


def find_registered(kind: type[nn.Module]) -> Any:
    """Return what a class was registered as, or None."""
    return REGISTERED.get(kind)
