"""Normalise names of modules and operators, so that two programs' names for one place are equal."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NUMBER_AFTER = re.compile(r"[_\[](\d+)\]?(?=\.|$)")


def normal_module(path: str) -> str:
    """Return a module's path without wrappers, with one spelling of numbered layers.

    Example:
        >>> from isobit.comparing.dumps.names import normal_module
        >>> normal_module("module._orig_mod.model.layers.3.mlp")
        'model.layer.3.mlp'
        >>> normal_module("model.layer_3.mlp") == normal_module("model.layers[3].mlp")
        True
    """
    parts = _NUMBER_AFTER.sub(r".\1", path.replace("/", ".")).split(".")
    parts = [part for part in parts if part and part not in _WRAPPERS]
    for at, part in enumerate(parts[:-1]):
        if parts[at + 1].isdigit() and len(part) > 1:
            parts[at] = part.removesuffix("s")
    return ".".join(parts).lower()


def normal_operator(name: str) -> str:
    """Return an operator's name without overload, in-place mark and spelling of its namespace.

    Example:
        >>> from isobit.comparing.dumps.names import normal_operator
        >>> normal_operator("aten::add_.Tensor"), normal_operator("torch.ops.aten.add.Tensor")
        ('aten::add', 'aten::add')
    """
    name = without_address(name).removeprefix("torch.ops.")
    found = re.fullmatch(r"(\w+)(?:::|\.)(\w+?)_?(?:\.\w+)?", name)
    if found and ("::" in name or found[1] in ("aten", "prims", "prim")):
        return f"{found[1]}::{found[2]}"
    return name


def without_address(name: str) -> str:
    """Remove memory addresses, which differ from run to run."""
    return _ADDRESS.sub("", name)


def shared_root(paths: Iterable[str]) -> str:
    """Return the first part that all non-empty paths share and that is no number, or nothing."""
    roots = {path.partition(".")[0] for path in paths if path}
    root = roots.pop() if len(roots) == 1 else ""
    return "" if root.isdigit() else root


def without_root(path: str, root: str) -> str:
    """Remove the shared root of a path."""
    return path.removeprefix(root).removeprefix(".") if root else path
