"""Read the text of torch's `DebugMode.debug_string()`: one call per line, indented by depth.

[Note: Depth and modules]
With `record_nn_module`, a module that is entered is a line of its own, and calls in it are indented further. A line
`ns::op(...)` inside a module is two spaces deeper than the module's line; calls of `record_torchfunction` (names
without `::`) are as deep as the module's line. A module therefore ends at the first line that is not deeper than it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from isobit.comparing.dumps.names import without_address
from isobit.comparing.dumps.records import Entry, Output, Unreadable
from isobit.foundation.plain_text import one_line

LONGEST_LINE = 1 << 20  # characters; what hooks append may be long, but not endless
_MODULE = re.compile(r"\[nn\.Mod[^\]]*\] (.*)")
_ANNOTATION = re.compile(r"\[[^\]]*\] |-> output: ")
_SOURCE = re.compile(r"# File: (.+):(\d+) in ")
_KERNEL_HASHES = re.compile(r"# (pre|post)-kernel hashes: \{(.*)\}$")
_CALL = re.compile(r"(?:\[triton\] )?(<.*?>|[\w.:]+(?: \[(?:im|ex)plicit\] )?)\(")
_TENSOR = re.compile(r"(?:^|[\s'\"(\[{])(?:dt|ft|t)(?:\$\d+)?: (\w+)\[([^\]]*)\]")
_SPECIAL = re.compile(r"(?<![\w'\"])-?(?:nan|inf)(?![\w'\"])")
_ARROW = "  ->  "


def read_debug_text(text: str) -> tuple[tuple[Entry, ...], tuple[Unreadable, ...]]:
    """Return the calls of a log, and the lines that are none.

    Args:
        text: What `debug_string()` returned, with or without stack traces.

    Returns:
        The entries in order, and what could not be read.

    Example:
        >>> from isobit.comparing.dumps.debug_text import read_debug_text
        >>> (entry,), _ = read_debug_text("    aten::neg(t: f32[2])  ->  t: f32[2]  # {'hash': 3.0}")
        >>> entry.operator, entry.outputs[0].shape, entry.hashes
        ('aten::neg', (2,), (('', '3.0'),))
    """
    reader = LogReader()
    reader.read(text.split("\n"))
    return tuple(reader.entries), reader.unreadable


class LogReader:
    """Reads lines of a log one after another and numbers the calls."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._modules: list[tuple[int, str]] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._source = ""
        self._unread: list[tuple[int, str]] = []
        self._lines = 0

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """The lines that are no calls, as one record."""
        if not self._unread:
            return ()
        number, line = self._unread[0]
        several = f"{len(self._unread)} lines, the first is line {number}"
        where = several if len(self._unread) > 1 else f"line {number}"
        return (Unreadable(where, f"not a line of a DebugMode log: {one_line(line)[:80]}"),)

    def read(self, lines: Iterable[str]) -> None:
        """Read lines; those that are neither calls nor annotations are kept in `unreadable`."""
        for line in lines:
            self._lines += 1
            text = line.strip()
            if not text:
                continue
            if len(line) > LONGEST_LINE:
                self._unread.append((self._lines, line[:80]))
            elif text.startswith("#"):
                self._read_comment(text)
            else:
                self._read_line(text, (len(line) - len(line.lstrip(" "))) // 2 - 1)

    def _read_comment(self, text: str) -> None:
        if found := _SOURCE.match(text):
            self._source = f"{found[1]}:{found[2]}"
        elif (found := _KERNEL_HASHES.match(text)) and self.entries and found[1] == "post":
            pairs = [part.rpartition(": ") for part in found[2].split(", ")]
            hashes = tuple((name, value) for name, _, value in pairs)
            self.entries[-1] = _with_hashes(self.entries[-1], hashes)

    def _read_line(self, text: str, depth: int) -> None:
        if found := _MODULE.fullmatch(text):
            self._leave(depth)
            self._modules.append((depth, found[1]))
            return
        found = _CALL.match(text)
        if not found:
            if not _ANNOTATION.match(text):
                self._unread.append((self._lines, text))
            return
        operator = without_address(found[1]).strip()
        self._leave(depth if "::" in operator or text.startswith("[triton]") else depth + 1)
        module = self._modules[-1][1] if self._modules else ""
        call, log = _split_log(text)
        outputs = call.rpartition(_ARROW)[2] if _ARROW in call else ""
        self.entries.append(
            Entry(
                module,
                operator,
                self._calls[module, operator],
                len(self.entries),
                outputs=tuple(_output(*found) for found in _TENSOR.findall(outputs)),
                hashes=log,
                source=self._source,
            )
        )
        self._calls[module, operator] += 1

    def _leave(self, depth: int) -> None:
        while self._modules and self._modules[-1][0] >= depth:
            self._modules.pop()


def flatten(value: Any, path: str = "") -> tuple[tuple[str, str], ...]:
    """Return the leaves of nested tuples, lists and dictionaries as pairs of a path and text; None is no leaf."""
    if value is None:
        return ()
    if isinstance(value, dict):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, tuple | list):
        parts = enumerate(value)
    else:
        return ((path, value if isinstance(value, str) else repr(value)),)
    inner = [flatten(one, f"{path}.{key}" if path else str(key)) for key, one in parts]
    return tuple(leaf for leaves in inner for leaf in leaves)


def _split_log(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Split a line into the call and the hash of its result that hooks have appended."""
    call, mark, log = text.rpartition("  # {")
    if not mark or not log.endswith("}"):
        return text, ()
    try:
        found = ast.literal_eval("{" + _SPECIAL.sub(r"'\g<0>'", log))
        return call, flatten(found.get("hash"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        # Hooks may append anything, such as tensors: compared as text.
        _, mark, text = log.partition("'hash': ")
        return call, ((("", text[:-1]),) if mark else ())


def _output(dtype: str, shape: str) -> Output:
    sizes = [size.strip() for size in shape.split(",") if size.strip()]
    known = all(size.isascii() and size.isdigit() and len(size) < 19 for size in sizes)
    return Output(dtype, tuple(int(size) for size in sizes) if known else None)


def _with_hashes(entry: Entry, hashes: tuple[tuple[str, str], ...]) -> Entry:
    return Entry(**{**entry.__dict__, "hashes": hashes})
