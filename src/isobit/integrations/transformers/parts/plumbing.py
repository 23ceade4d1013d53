"""Whether a composite only calls its children and moves data, by a list of what its source may call."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

from isobit.integrations.transformers.parts.source import functions_below, nodes_of

# Methods of tensors, caches and containers that move data and compute nothing from the shape of the batch.
METHODS = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "contiguous",
        "chunk",
        "split",
        "unbind",
        "permute",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "to",
        "size",
        "get_interface",
        "update",
        "items",
        "append",
        "get",
        "pop",
        "keys",
        "values",
        "copy",
        "type_as",
        "float",
        "clone",
        "detach",
        "dim",
    ]
)
FUNCTIONS = frozenset(
    [
        "getattr",
        "isinstance",
        "enumerate",
        "range",
        "len",
        "tuple",
        "list",
        "dict",
        "zip",
        "hasattr",
        "int",
        "bool",
        "float",
        "super",
        "torch.split",
        "torch.cat",
        "torch.chunk",
        "torch.stack",
        "nn.functional.dropout",
        "F.dropout",
        "torch.nn.functional.dropout",
        "ALL_ATTENTION_FUNCTIONS.get_interface",
        "ValueError",
        "TypeError",
        "NotImplementedError",
    ]
)
# A backbone is given positions, so that what it would compute of shapes and of the cache's length is not used.
OF_BACKBONES = frozenset(
    [
        "torch.arange",
        "create_causal_mask",
        "create_sliding_window_causal_mask",
        "create_masks_for_generate",
        "DynamicCache",
        "set",
        "BaseModelOutputWithPast",
        "logger.warning_once",
    ]
)
METHODS_OF_BACKBONES = frozenset(("get_seq_length", "expand"))
OPERATORS = (
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Pow,
    ast.BitXor,
    ast.BitAnd,
    ast.BitOr,
)


@lru_cache(maxsize=1024)
def find_computation(function: Any, kind: Any, backbone: bool = False) -> str | None:
    """Return the first thing in a forward that is neither a call of a child nor a move of data, or None."""
    for one in functions_below(kind, function):
        local = names_of_calls(one)
        for node in nodes_of(one):
            if isinstance(node, ast.Call) and not is_plumbing(node, local, backbone):
                return f"{ast.unparse(node.func)}() in {one.__qualname__}"
            if isinstance(node, ast.BinOp) and not isinstance(node.op, OPERATORS):
                return f"`{ast.unparse(node)}` in {one.__qualname__}"
    return None


def names_of_calls(function: Any) -> set[str]:
    """Return local names that are layers of a loop, an attention function or a mask function, which may be called."""
    found = set()
    for node in nodes_of(function):
        if isinstance(node, ast.For):
            found |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            text = ast.unparse(node.value)
            if "get_interface" in text or text.startswith("create_"):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def is_plumbing(call: ast.Call, local: set[str], backbone: bool) -> bool:
    """Return whether a call moves data, or calls a child, a method, a rotation or an attention function."""
    name, text = call.func, ast.unparse(call.func)
    if text in FUNCTIONS or (backbone and text in OF_BACKBONES):
        return True
    if isinstance(name, ast.Name):
        return (
            name.id in local
            or name.id.startswith("apply_rotary")
            or (backbone and name.id.endswith("OutputWithPast"))
        )
    if not isinstance(name, ast.Attribute):
        return False
    if isinstance(name.value, ast.Name) and name.value.id == "self":
        return (
            True  # a child, which is looked at by itself, or a method, whose source is walked too
        )
    if text.startswith(("torch.", "F.", "nn.")) and text.replace(".", "").isidentifier():
        return False  # a function of torch, and not a method of what one returns
    return name.attr in METHODS or (backbone and name.attr in METHODS_OF_BACKBONES)
