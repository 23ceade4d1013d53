"""Find the module and the source line of a call of an operator, from Python's frames: no hook is installed."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
from torch import nn

from isobit.auditing.records import Place

TORCH = os.path.dirname(torch.__file__) + os.sep
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(HERE)) + os.sep
DEEPEST = 120  # frames that are looked at


class Places:
    """The places of a model's calls.

    A backward operator has no frame of the model: it is placed by the sequence number of its autograd node, which the
    forward operator that made the node had, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.at_node: dict[int, tuple[str, str]] = {}

    def find(self, operator: str, call: int) -> Place:
        """Return the place of the operator that is being dispatched."""
        node = torch._C._current_autograd_node()
        if node is not None:
            module, source = self.at_node.get(node._sequence_nr(), ("", ""))
            return Place(operator, module, source, call, backward=True)
        module, source = self._from_frames(sys._getframe(2))
        # Operators without a gradient after it see the same number: the first one made the node.
        self.at_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, (module, source))
        return Place(operator, module, source, call)

    def _from_frames(self, frame: FrameType | None) -> tuple[str, str]:
        source, within, module, left = "", "", None, False
        for _ in range(DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            file = code.co_filename
            if file.startswith(HERE):
                if left:  # the audit itself, which called the model
                    break
            elif not file.startswith("<"):
                left = True
                if not source and not file.startswith((TORCH, PACKAGE)):
                    source = f"{short_path(file)}:{frame.f_lineno}"
            if module is None and code.co_argcount and code.co_varnames[0] in ("self", "module"):
                module = self.names.get(id(frame.f_locals.get(code.co_varnames[0])))
                if module is not None:
                    within = f"{short_path(file)}:{frame.f_lineno}"
            if source and module is not None:
                break
            frame = frame.f_back
        return module or "", source or within


def short_path(file: str) -> str:
    """Return a path without the folder of installed packages, or relative to the current folder."""
    for folder in ("site-packages", "dist-packages"):
        _, found, rest = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return rest
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
