"""Record which executor served each call of an operator, and with which sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Names of the sizes of a launch where they are not (rows, n).
SIZE_NAMES: dict[str, tuple[str, ...]] = {"linear": ("rows", "k", "n")}


@dataclass(frozen=True)
class Launch:
    """One forward call of an operator with its sizes: (rows, K, N) for linear, (rows, n) for a function of rows."""

    operator: str
    executor: str  # native, portable or triton
    dtype: str
    sizes: tuple[int, ...]

    def named(self) -> dict[str, int]:
        """Return the sizes by name, so that two problems with the same numbers in other places differ."""
        names = SIZE_NAMES.get(self.operator, ("rows", "n"))
        if len(names) != len(self.sizes):
            names = tuple(f"size {at}" for at in range(len(self.sizes)))
        return dict(zip(names, self.sizes, strict=True))


_recordings: list[list[Launch]] = []


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect the launches of all threads of this process while the context is open, except those of compiled code."""
    launches: list[Launch] = []
    _recordings.append(launches)
    try:
        yield launches
    finally:
        # By identity: two recordings of the same launches are equal.
        del _recordings[next(i for i, known in enumerate(_recordings) if known is launches)]


def is_recording() -> bool:
    """Return True while `record_launches()` is open. Checked first so that recording costs nothing otherwise."""
    return not torch.compiler.is_compiling() and bool(_recordings)


def record(operator: str, executor: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Add a launch to every open recording."""
    launch = Launch(operator, executor, str(dtype).removeprefix("torch."), sizes)
    for recording in _recordings:
        recording.append(launch)
