"""Transformers, imported when first asked for: isobit itself does not need it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from isobit.errors import UnsupportedError


def library(part: str = "") -> Any:
    """The library, or one of its modules; a refusal where it is not installed."""
    try:
        return import_module(f"transformers.{part}" if part else "transformers")
    except ImportError as error:
        raise UnsupportedError(
            expected="transformers to be installed", received=str(error), remedy="pip install transformers"
        ) from error
