"""Types of arguments that several commands share: numbers, shapes, axes, dtypes (fp32 or float32), scripts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from isobit.errors import ArgumentError

LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHORT = {long: short for short, long in LONG.items()}


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option for whose code may be imported."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package whose code contracts may name; it is imported, also from the current folder (isobit always is)",
    )


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


def at_least_one(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1; received {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    """Parse `1,2,8`."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers like 1,2,8; received {text!r}"
        ) from None
    if any(number < 1 for number in found):
        raise argparse.ArgumentTypeError(f"expected numbers from 1; received {text!r}")
    return found


def axes_among(*known: str) -> Callable[[str], list[str]]:
    """Read a list of axes, of those that a command has."""

    def read(text: str) -> list[str]:
        found = [part for part in text.split(",") if part]
        if not found or not set(found) <= set(known):
            raise argparse.ArgumentTypeError(
                f"expected axes among {', '.join(known)}, received {text!r}"
            )
        return list(dict.fromkeys(found))

    return read


def shape(text: str) -> tuple[int, int]:
    """Read samples × tokens."""
    found = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if not found or not int(found[1]) or not int(found[2]):
        raise argparse.ArgumentTypeError(f"expected SAMPLESxTOKENS such as 8x24, received {text!r}")
    return int(found[1]), int(found[2])


def check_script(path: Path) -> None:
    """Raise ArgumentError if a path is not a file."""
    if not path.is_file():
        raise ArgumentError(
            expected="a Python script",
            received=f"{'a folder' if path.is_dir() else 'no such file'}: {path}",
            remedy="name a script by its path; arguments after -- are passed to the script",
        )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the option for where parallel work runs."""
    parser.add_argument(
        "--on",
        default="local",
        metavar="ENGINE",
        help="where tasks run: local, ray (RAY_ADDRESS, or a cluster started here), ray:HOST:PORT, ray://HOST:PORT or "
        "dask:tcp://HOST:PORT (default: %(default)s)",
    )
