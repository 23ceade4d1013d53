"""Read tensors from .pt and .safetensors files without running code that is in them."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from isobit.comparing.dumps import records
from isobit.comparing.tensor_files import Stored, read_safetensors
from isobit.errors import ArgumentError, in_one_line
from isobit.foundation.plain_text import one_line

SUFFIXES = (".pt", ".pth", ".safetensors")
LARGEST_EXPANDED = 1 << 28  # elements of a tensor that repeats its memory


class UnreadableError(Exception):
    """A file that is not what its name says, or that could only be read by running code in it."""


class TensorReader:
    """Reads tensors of files; keeps the file read last, as entries of one file follow each other."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._contents: Any = None

    def keys(self, path: Path) -> list[str]:
        """Return the names of a file's tensors, or nothing if one has none: then they are compared as one entry."""
        if path.suffix == ".safetensors":
            return list(_safetensors(path))
        contents = self._load(path)
        if not isinstance(contents, dict) or "value" in contents:
            return []
        named = all(isinstance(key, str) for key in contents)
        return list(contents) if named else []

    def read(self, stored: records.Stored) -> list[tuple[str, Any]]:
        """Return an entry's tensors and plain values, each with its path in the entry."""
        if stored.path.suffix == ".safetensors":
            known = _safetensors(stored.path)
            absent = [one_line(str(key)) for key in stored.keys if key not in known]
            if absent:
                raise UnreadableError(f"no tensors {absent} in {stored.path.name}")
            return [("", known[str(key)].load()) for key in stored.keys]
        contents = self._load(stored.path)
        found: list[tuple[str, Any]] = []
        try:
            parts = [contents[key] for key in stored.keys] if stored.keys else [contents]
        except (KeyError, TypeError, IndexError):
            raise UnreadableError(f"no tensors {list(stored.keys)} in {stored.path.name}") from None
        for at, part in enumerate(parts):
            if isinstance(part, dict) and "value" in part:
                part = part["value"]  # as SGLang's dumper writes it, with "meta" beside it
            found += list(_leaves(part, str(at) if len(parts) > 1 else ""))
        found = _unique(found)
        for _, one in found:
            _check_size(one)
        return found

    def _load(self, path: Path) -> Any:
        if path != self._path:
            self._path = None
            check_regular(path)
            try:
                self._contents = _load_weights(path)
            except Exception as error:  # a damaged file makes torch raise nearly anything
                reason = one_line(str(error)).split(". ")[0][:120]
                raise UnreadableError(f"{type(error).__name__}: {reason}") from None
            self._path = path
        return self._contents


def check_regular(path: Path) -> None:
    """Raise for what is not a regular file: a pipe would be waited for."""
    try:
        kind = os.stat(path).st_mode
    except OSError as error:
        raise UnreadableError(error.strerror or "cannot be opened") from None
    if not stat.S_ISREG(kind):
        raise UnreadableError("not a regular file")


def _load_weights(path: Path) -> Any:
    """Load with `weights_only`; files of torch's older format cannot be mapped into memory."""
    with open(path, "rb") as file:
        is_archive = file.read(2) == b"PK"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        parts: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, tuple | list) and any(
        isinstance(one, torch.Tensor | dict | tuple | list) for one in value
    ):
        parts = iter(enumerate(value))
    else:
        yield path, value
        return
    for key, one in parts:
        yield from _leaves(one, f"{path}.{key}" if path else str(key))


def _unique(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return unique paths: those that occur twice, as those of 1 and "1" do, get a number."""
    seen: Counter[str] = Counter()
    unique = []
    for path, value in found:
        seen[path] += 1
        unique.append((path if seen[path] == 1 else f"{path} ({seen[path]})", value))
    return unique


def _check_size(value: Any) -> None:
    """Raise for a tensor whose shape claims far more memory than the file has."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return
    size = value.numel() * value.element_size()
    if value.numel() > LARGEST_EXPANDED and size > value.untyped_storage().nbytes():
        raise UnreadableError(f"a tensor of shape {list(value.shape)} in a file without its values")


def _safetensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file; none of them is read yet."""
    try:
        return read_safetensors(path).tensors
    except (ArgumentError, OSError) as error:
        raise UnreadableError(in_one_line(error)) from None
