"""Recognise isobit's own operators and gradient nodes by what is registered, because names can be imitated."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any

import torch

from isobit.ops.gpu.executors import is_triton_operator
from isobit.ops.registration import is_portable_operator

GENERATED = re.compile(r"GeneratedBackwardFor_isobit_(\w+)_default")
# The formulas of csrc/derivatives.cpp. No code in Python can make a node of this type.
COMPILED = re.compile(
    r"torch::autograd::CppNode<isobit::derivatives::Gradient<isobit::derivatives::\w+> ?>"
)
# What torch.profiler.record_function calls; nothing else in that namespace is torch's.
PROFILER = frozenset(
    ("_record_function_enter", "_record_function_enter_new", "_record_function_exit")
)


@lru_cache(maxsize=256)
def is_our_operator(name: str) -> bool:
    """Return whether `isobit::<name>` is a compiled kernel, or an operator of the portable or the Triton executors."""
    if is_portable_operator(name) or is_triton_operator(name):
        return True
    try:
        said = torch._C._dispatch_dump(f"isobit::{name}")
    except RuntimeError:
        return False
    # Kernels that Python registers have no unboxed form.
    kernels = [line for line in said.splitlines() if line.startswith(("CPU:", "Composite"))]
    return bool(kernels) and all("unboxed" in line for line in kernels)


def is_our_node(node: Any) -> bool:
    """Return whether a node of the autograd graph is our operator's formula or our autograd.Function."""
    made = getattr(node, "_forward_cls", None)
    if made is None:
        return type(node).__name__ == "CppFunction" and bool(COMPILED.fullmatch(node.name()))
    generated = GENERATED.fullmatch(made.__name__)
    if generated is not None:
        return made.__module__ == "torch._library.autograd" and is_our_operator(generated[1])
    return is_in_package(made.__module__, made.__qualname__, made)


def is_in_package(module: str, name: str, wanted: Any) -> bool:
    """Return whether this object is found under its name in a module of isobit."""
    if module.partition(".")[0] != "isobit":
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is wanted
