"""A digest of the code that trains. Stored curves of other code are not reused."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from blake3 import blake3

from isobit.ops import dispatch


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Return a digest of the package's files and kernels, the bf16 engine, and torch's version."""
    root = Path(dispatch.__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".so"))
    found = blake3(f"{torch.__version__}, {dispatch.engine_of(torch.bfloat16)}".encode())
    for path in files:
        found.update(f"\n{path.relative_to(root)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest(length=8)
