"""Import transformers on first use, and check its version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

from isobit.errors import UnsupportedError

# The versions whose modules were read; pyproject.toml has the same range. 5.23 has masks, heads of mixtures and layers
# of linear attention that 5.22 has not.
FIRST, BEFORE = (5, 22), (5, 23)
RANGE = "transformers>=5.22,<5.23"
REMEDY = f"pip install '{RANGE}'"


def library(part: str = "") -> Any:
    """Return transformers, or one of its modules; raise where it is missing or of another version."""
    try:
        check_version(import_module("transformers").__version__)
        return import_module(f"transformers.{part}" if part else "transformers")
    except ImportError as error:
        raise UnsupportedError(
            expected=f"{RANGE} to be installed", received=str(error), remedy=REMEDY
        ) from error


@lru_cache(maxsize=4)
def check_version(version: str) -> None:
    """Raise unless the version is in the range: modules are matched by class, and earlier ones have other fields."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not FIRST <= numbers < BEFORE:
        raise UnsupportedError(expected=RANGE, received=f"transformers {version}", remedy=REMEDY)


@contextmanager
def without_bars() -> Iterator[None]:
    """Save and load without transformers' progress bars: the caller shows its own."""
    logging = library("utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
