"""Load the native kernels, or return the reason why there are none."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
_loads: list[str] = []  # one entry per attempt to load the library, with its result


@lru_cache(maxsize=1)
def load() -> str | None:
    """Load the library once; return None, or the reason why there are no native kernels."""
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
    """Return how often this process has loaded the library: 0 until a kernel is needed, then 1."""
    return len(_loads)


def build_flags() -> str:
    """Return the compiler flags, read from the library itself."""
    return str(torch.ops.isobit.build_flags()) if load() is None else "no library"


def pairs_bf16() -> bool:
    """Return whether the tile engine multiplies bf16 in pairs (AMX); elsewhere bf16 is widened to fp32."""
    return load() is None and bool(torch.ops.isobit.pairs_bf16())
