"""Backward passes in which the modes of a rank stay on: torch switches function modes off in them, also for hooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.overrides

from isobit.simulator.program.process_state import replaced

_here = threading.local()


@contextmanager
def lasting(mode: Any) -> Iterator[None]:
    """Enter a function mode of the current thread that stays on in backward passes."""
    before = getattr(_here, "modes", ())
    _here.modes = (*before, mode)
    try:
        with mode:
            yield
    finally:
        _here.modes = before


def engine_of(plain: Any) -> Any:
    """Return a replacement for the call of torch's autograd engine."""

    def run(*args: Any, **options: Any) -> Any:
        overrides: Any = torch.overrides
        on = overrides._get_current_function_mode_stack()
        with ExitStack() as stack:
            for mode in getattr(_here, "modes", ()):
                if mode not in on:
                    stack.enter_context(mode)
            return plain(*args, **options)

    return run


@contextmanager
def modes_in_backward() -> Iterator[None]:
    """Keep the modes of ranks on while a world runs."""
    owner: Any = torch.autograd
    with replaced(owner, "_engine_run_backward", engine_of(owner._engine_run_backward)):
        yield
