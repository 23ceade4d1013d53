"""A checkpoint whose tensors are read one at a time."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from isobit.errors import ArgumentError
from isobit.foundation.plain_text import one_line

DEEPEST = 64  # containers inside each other
LARGEST_EXPANSION = 1 << 30  # bytes that a tensor may have beyond its storage, as after `expand`


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        load: reads it.
        memory: equal for two names only if the file stores them as one tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    memory: tuple[Any, ...] = ()


@dataclass
class Checkpoint:
    """What a path contains.

    Attributes:
        path: where it is.
        kind: the format, in words.
        tensors: its tensors by name.
        values: numbers and texts by name, as text in which every bit of a float is visible.
        ties: names that are absent because they are another name's tensor, with what shows it.
        notes: what the reader had to decide.
    """

    path: Path
    kind: str
    tensors: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    ties: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_tensor(self, name: str, tensor: Stored) -> None:
        """Add a tensor; raise if the name is taken."""
        self._check_free(name)
        self.tensors[name] = tensor

    def add_value(self, name: str, value: str) -> None:
        """Add a number or a text; raise if the name is taken."""
        self._check_free(name)
        self.values[name] = value

    def _check_free(self, name: str) -> None:
        if name in self.tensors or name in self.values:
            raise unreadable(self.path, "one entry per name", f"{one_line(name)!r} twice")


def unreadable(path: Path, expected: str, received: str, remedy: str = "") -> ArgumentError:
    """Return the error for a checkpoint that cannot be read."""
    return ArgumentError(
        expected=expected,
        received=f"{one_line(received)} in {path}",
        remedy=remedy or "save the checkpoint again, or name another file",
    )


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """Open a regular file and return it with its size; raise OSError for a device, a pipe or a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb"), found.st_size


def add_tree(found: Checkpoint, name: str, value: Any, inside: tuple[int, ...] = ()) -> None:
    """Add a tensor, a plain value, or a tree of them with dotted names.

    Args:
        found: Where to add it.
        name: Its name; "" for a whole file.
        value: Tensors and plain values in mappings, lists and tuples.
        inside: Identities of the containers around it.
    """
    if isinstance(value, torch.Tensor):
        found.add_tensor(name, stored_tensor(found.path, name, value))
    elif isinstance(value, Mapping):
        check_depth(found, name, value, inside)
        for key, item in value.items():
            path = f"{name}.{key}" if name else str(key)
            add_tree(found, path, item, (*inside, id(value)))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        check_depth(found, name, value, inside)
        texts = [plain_value(item) for item in value]
        if all(text is not None for text in texts):
            found.add_value(name, f"[{', '.join(text or '' for text in texts)}]")
            return
        for index, item in enumerate(value):
            path = f"{name}.{index}" if name else str(index)
            add_tree(found, path, item, (*inside, id(value)))
    else:
        text = plain_value(value)
        if text is None:
            kind = type(value).__name__
            raise unreadable(found.path, "tensors, numbers and texts", f"a {kind} at {name!r}")
        found.add_value(name, text)


def check_depth(found: Checkpoint, name: str, value: object, inside: tuple[int, ...]) -> None:
    """Raise if a container contains itself, or if containers are nested too deeply."""
    if id(value) in inside or len(inside) >= DEEPEST:
        raise unreadable(
            found.path, f"containers nested at most {DEEPEST} deep", f"more at {name[:200]!r}"
        )


def stored_tensor(path: Path, name: str, tensor: torch.Tensor) -> Stored:
    """Return a loaded (or mapped) tensor as an entry; raise for a layout without plain elements."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_nested
    ):
        kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized}
        kinds |= {"meta": tensor.is_meta, str(tensor.layout): True}
        how = next(kind for kind, found in kinds.items() if found)
        raise unreadable(path, "dense tensors", f"a {how} tensor at {name!r}")
    storage = tensor.untyped_storage()
    if tensor.numel() * tensor.element_size() > storage.nbytes() + LARGEST_EXPANSION:
        raise unreadable(path, "as many elements as bytes", f"{list(tensor.shape)} at {name!r}")
    memory = (storage.data_ptr(), tensor.storage_offset(), tensor.stride(), tuple(tensor.shape))
    return Stored(
        tensor.dtype,
        tuple(tensor.shape),
        lambda: tensor.detach(),
        (*memory, tensor.dtype) if storage.data_ptr() else (),
    )


def plain_value(value: Any) -> str | None:
    """Return a number or a text as text, every bit of a float visible; None for anything else."""
    if isinstance(value, float):
        return f"{value!r} ({value.hex()})"
    if value is None or isinstance(value, bool | int | str | bytes | complex):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value)
    return None
