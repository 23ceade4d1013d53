"""Mark functions whose results torch.compile takes as constants.

torch.compiler.assume_constant_result does the same, and imports the compiler, which takes as long as torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile call a function while it traces, and keep the result in the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
