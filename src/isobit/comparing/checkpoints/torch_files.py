"""Read files of torch.save without running code: only tensors, containers and plain values are unpickled."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from isobit.comparing.checkpoints.stored import Checkpoint, add_tree, open_regular, unreadable

ZIP = b"PK\x03\x04"


def read_torch_file(path: Path) -> Checkpoint:
    """Read a file of torch.save, with `weights_only=True` and mapped into memory where the format allows it.

    Args:
        path: A .pt, .pth, .bin or .ckpt file.

    Returns:
        The checkpoint, its containers flattened into dotted names.

    Raises:
        ArgumentError: If the file is damaged, or contains more than tensors, containers, numbers and texts.
        OSError: If the path is not a regular file.
    """
    file, _ = open_regular(path)
    with file:
        is_zip = file.read(4) == ZIP
    found = Checkpoint(path, "torch.save file")
    add_tree(found, "", load_safely(path, str(path), mmap=is_zip))
    return found


def load_safely(path: Path, source: str | io.BytesIO, *, mmap: bool = False) -> Any:
    """Unpickle tensors and plain containers; raise for anything that could run code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats; what cannot be read raises
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        refused = re.search(
            r"GLOBAL (\S+)|[Uu]nsupported (?:global|operand|class)[^\n]*", str(error)
        )
        what = refused.group(0).rstrip(".") if refused else str(error).splitlines()[0]
        raise unreadable(
            path,
            "a file that weights_only=True can load: tensors, containers, numbers and texts",
            what[:300],
            "save the state dict instead of the object: its code is not run",
        ) from error
    except Exception as error:  # a damaged file raises almost anything
        lines = str(error).splitlines() or [type(error).__name__]
        raise unreadable(
            path,
            "a file of torch.save",
            lines[0][:300],
            "copy or download the file again: it is damaged, or in another format",
        ) from error
