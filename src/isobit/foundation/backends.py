"""Choose what runs the Triton executors of operators: by default the GPU of a call's tensors, else a chosen backend.

A backend is chosen for a block of code, in one thread, and by nothing else: no environment variable, no setting.
`isobit.certifying.executing` chooses the two that need no GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Backend(Protocol):
    """What runs Triton kernels.

    Attributes:
        kind: Its name: "interpreter", "machine", or "card".
        target: The GPU whose code or arithmetic it has, such as "sm_90".
        engine: The arithmetic of that GPU's matrix products, such as "tc25x16".
    """

    @property
    def kind(self) -> str:
        """Return the name."""

    @property
    def target(self) -> str:
        """Return the GPU."""

    @property
    def engine(self) -> str:
        """Return the arithmetic of matrix products."""

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Run one kernel, and return after its results are in its arguments.

        Args:
            kernel: A `@triton.jit` function.
            grid: Programs along one to three axes, none of them 0.
            args: Tensors and numbers, in the order of the kernel's parameters.
            constants: Its `tl.constexpr` parameters by name.
            options: Of Triton's compiler: num_warps, num_stages, enable_fp_fusion.
        """


_chosen: ContextVar[Backend | None] = ContextVar("isobit_backend", default=None)
_lock = threading.Lock()
# Blocks of all threads that are open. Code compiled by torch.compile cannot read a ContextVar; it has a guard on this
# number, and leaves a call to Python while a block is open anywhere.
_open = 0


def chosen() -> Backend | None:
    """Return the backend that this thread has chosen, if any."""
    return _chosen.get() if _open else None


@contextmanager
def use(backend: Backend) -> Iterator[Backend]:
    """Choose a backend for this thread while the context is open; the innermost context counts."""
    global _open
    token = _chosen.set(backend)
    with _lock:
        _open += 1
    try:
        yield backend
    finally:
        with _lock:
            _open -= 1
        _chosen.reset(token)
