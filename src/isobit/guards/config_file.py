"""Read the configuration of a training run: YAML, JSON or TOML, and nothing that is executed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from isobit.errors import ArgumentError
from isobit.foundation.files import read_bytes
from isobit.foundation.plain_text import one_line

LARGEST = 2**24  # bytes of a configuration
MOST_VALUES = 100_000  # aliases of YAML may stand for many more than the file has
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle")


def read_config(path: Path, option: str = "--config") -> dict[str, Any]:
    """Read a file of names and values. JSON is YAML too.

    Args:
        path: The file. With the suffix .toml it is TOML, as torchtitan's.
        option: The option that names it, for errors.

    Raises:
        ArgumentError: If it is no such file, or a pickle.
    """
    if path.suffix in PICKLES:
        raise ArgumentError(
            expected=f"{option} in YAML, JSON or TOML",
            received=f"{path}: a pickle, which may run code when it is read",
            remedy="write training_args.to_json_string() of transformers into a .json file, and name that",
        )
    try:
        text = read_bytes(path, LARGEST).decode()
        found = read_toml(path, text) if path.suffix == ".toml" else yaml.safe_load(text)
        values = plain_copy(found, [MOST_VALUES])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ArgumentError(
            expected=f"{option} in YAML, JSON or TOML",
            received=f"{path}: {one_line(str(error))}",
            remedy=f"correct the file, or leave {option} out",
        ) from error
    if not isinstance(values, dict):
        raise ArgumentError(
            expected=f"{option} with names and values",
            received=f"{path}: {type(values).__name__}",
            remedy="write one name per line, such as lr: 1e-4",
        )
    return values


def read_toml(path: Path, text: str) -> Any:
    """Read TOML, which Python has a reader for from 3.11 on."""
    if sys.version_info < (3, 11):
        raise ArgumentError(
            expected="Python 3.11 for a configuration in TOML",
            received=f"Python {sys.version_info[0]}.{sys.version_info[1]}, {path}",
            remedy="write the values into a YAML file",
        )
    return import_module("tomllib").loads(text)


def plain_copy(value: Any, left: list[int]) -> Any:
    """Copy nested values, with texts as keys; `left` is the number of values that may still be copied."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    if isinstance(value, Mapping):
        return {str(key): plain_copy(each, left) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(each, left) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
