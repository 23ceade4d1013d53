"""Run a script until it calls its model, and keep that call: what `isobit audit script.py` audits."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from isobit.auditing.inputs import Inputs
from isobit.errors import ArgumentError


class Stop(BaseException):
    """Ends the script once the call is kept; not an Exception, so that a script does not catch it."""


@dataclass
class Capture:
    """Keeps the `wanted`-th outermost call of a module with parameters, counted from 0."""

    wanted: int = 0
    seen: int = 0
    depth: int = 0
    kept: list[Inputs] = field(default_factory=list)

    def enter(self, module: nn.Module, args: Any, named: Any) -> None:
        """Look at a call that begins."""
        if self.depth == 0 and next(module.parameters(), None) is not None:
            tensors = [v for v in _pytree.tree_leaves((args, named)) if isinstance(v, Tensor)]
            if tensors:
                if self.seen == self.wanted:
                    self.kept.append(Inputs(module, copy(args), copy(named)))
                    raise Stop
                self.seen += 1
        self.depth += 1


def copy(values: Any) -> Any:
    """Return arguments with tensors of their own, which the script cannot change any more."""
    return _pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, values)


@contextmanager
def watched(capture: Capture) -> Iterator[None]:
    """Show every call of a module to the capture."""
    plain = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **named: Any) -> Any:
        capture.enter(self, args, named)
        try:
            return plain(self, *args, **named)
        finally:
            capture.depth -= 1

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def capture_call(script: Path, words: Sequence[str], wanted: int = 0) -> Inputs:
    """Run a script as `python script.py words` would, and return the model and the inputs of one of its calls.

    Args:
        script: The script; it runs until the call.
        words: Its arguments.
        wanted: Which call of a model, counted from 0.

    Raises:
        ArgumentError: If the script fails or ends before the call.
    """
    capture = Capture(wanted)
    before = list(sys.argv), list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *words], [str(script.resolve().parent)]
    error: BaseException | None = None
    try:
        with watched(capture), torch.enable_grad():
            runpy.run_path(str(script), run_name="__main__")
    except Stop:
        pass
    except (Exception, SystemExit) as raised:
        error = raised
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
    if (
        capture.kept
    ):  # also where the script itself ended the process, or called its model in a thread
        return capture.kept[0]
    ended = "ended" if error is None else f"raised {type(error).__name__}: {error}"
    raise ArgumentError(
        expected=f"a script that calls a model with tensors at least {wanted + 1} times",
        received=f"{script.name} {ended} after {capture.seen} such calls",
        remedy="run it with python first; --call N chooses an earlier call",
    ) from error
