"""Names of dtypes on the command line: fp32 or float32."""

from __future__ import annotations

import argparse
from collections.abc import Callable

LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHORT = {long: short for short, long in LONG.items()}


def long_dtype(*known: str) -> Callable[[str], str]:
    """Read a name of either form, of those that a command supports (long names), as the long one."""

    def read(text: str) -> str:
        name = LONG.get(text, text)
        if name not in known:
            names = ", ".join(f"{SHORT[name]} ({name})" for name in known)
            raise argparse.ArgumentTypeError(f"expected one of {names}; received {text!r}")
        return name

    return read


def short_dtype(text: str) -> str:
    """Read a name of either form as the short one."""
    return SHORT[long_dtype(*SHORT)(text)]
