"""Code that torch.compile made: where a model has it, and how it is kept out of watched runs.

Torch does not run compiled code under a dispatch mode, but the eager module, and after one such call the compiled code
is never run again. An audit therefore asks for the eager module itself, and says that compiled code was not judged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isobit.auditing.axes.axes import NotApplicableError

NOT_WATCHED = (
    "compiled code is not watched, its eager form is: audit the model as it is before torch.compile, and what "
    "compiling changes on the axis compile"
)


def compiled_module(model: nn.Module) -> str:
    """Return the path of the first compiled module, "the model" for the whole, or "" if there is none."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    for path, module in model.named_modules():
        by_wrapping = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if by_wrapping or vars(module).get("_compiled_call_impl") is not None:
            return path or "the model"
    return ""


def check_eager(model: nn.Module) -> None:
    """Raise NotApplicableError for a model that is compiled already, since nothing in it could be compiled."""
    path = compiled_module(model)
    if path:
        raise NotApplicableError(
            f"{path} is compiled already; pass the module before torch.compile"
        )


class Stance:
    """Torch's choice between compiled code and eager modules, which is one for the whole process.

    Audits of several threads hold it together: the first asks for eager modules, and the last restores the choice.
    """

    def __init__(self) -> None:
        self.lock, self.holders = threading.Lock(), 0
        self.held: Any = None

    def take(self) -> None:
        """Ask for eager modules."""
        with self.lock:
            if not self.holders:
                self.held = torch.compiler.set_stance("force_eager")
            self.holders += 1

    def give(self) -> None:
        """Restore the choice after the last holder."""
        with self.lock:
            self.holders -= 1
            if not self.holders:
                self.held.__exit__(None, None, None)


STANCE = Stance()


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run eager modules in the place of compiled code; a no-op where nothing was ever compiled."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        yield
        return
    STANCE.take()
    try:
        yield
    finally:
        STANCE.give()
