"""Loads the native kernels, or says exactly why not."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
_loads: list[
    str
] = []  # an event each time that the library is looked for and loaded, and what came of it


@lru_cache(maxsize=1)
def load() -> str | None:
    """Loads the library once; returns None, or the reason why there are no native kernels."""
    found = sorted(FOLDER.glob("_native*.so"))
    if not found:
        noted = FOLDER / "native_build_failure.txt"
        reason = (
            noted.read_text().strip()
            if noted.exists()
            else "the package was installed without them"
        )
        _loads.append("not built")
        return f"not built: {reason}"
    try:
        torch.ops.load_library(str(found[0]))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"built, but not loadable: {error}"
    _loads.append(str(found[0]))
    return None


def load_count() -> int:
    """How many times this process looked for the library and loaded it: 0 until a kernel is asked for, then 1."""
    return len(_loads)


def build_flags() -> str:
    """The compiler flags, read back from the library itself."""
    return str(torch.ops.isobit.build_flags()) if load() is None else "no library"


def pairs_bf16() -> bool:
    """Whether the tile engine takes bf16 as pairs (AMX); elsewhere bf16 is widened to fp32."""
    return load() is None and bool(torch.ops.isobit.pairs_bf16())
