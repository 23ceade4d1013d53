"""The form in which a report is saved, by the suffix of the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from isobit.errors import ArgumentError

Writer = Callable[[Any], str]


def writer_of(path: str | os.PathLike[str], writers: Mapping[str, Writer]) -> Writer:
    """Return the writer of a file's suffix; raise ArgumentError if there is none.

    Example:
        >>> writer_of("page.txt", {".txt": str})(3)
        '3'
    """
    suffix = os.path.splitext(os.fspath(path))[1]
    if suffix not in writers:
        raise ArgumentError(
            expected=f"a file name that ends in {', '.join(writers)}",
            received=os.fspath(path),
            remedy="choose one of these suffixes",
        )
    return writers[suffix]
