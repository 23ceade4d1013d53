"""Read a pickle that holds only dicts, lists, tuples, strings, numbers, bools and None.

[Note: a closed reader]
A pickle is a program, and the files of a hang may come from anyone. Python's unpickler looks up classes by name and
calls them; it can be told to refuse names, but its C implementation still allocates what a file asks for. This reader
has no opcode that names, calls or builds anything else: torch's C++ pickler needs no others for a dump. Each step
reads at least one byte, and makes at most one small object, so time and memory follow the size of the file.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any

from isobit.errors import ArgumentError

NAMES = {opcode.code: opcode.name for opcode in pickletools.opcodes}


class ClosedReader:
    """The stack, the memo and the position of one reading."""

    def __init__(self, data: bytes) -> None:
        """Start at the first byte."""
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the value of the pickle.

        Raises:
            ArgumentError: If it holds anything but plain data, or ends too early.
        """
        data = self.data
        try:
            while True:
                code = data[self.at]
                self.at += 1
                step = STEPS.get(code)
                if step is None:
                    if code == _code("."):
                        return self.stack.pop()
                    raise self._refuse(code)
                step(self)
        except (IndexError, struct.error):
            raise ArgumentError(
                expected="a whole pickle",
                received=f"one that ends, or takes what is not there, at byte {self.at:,} of {len(data):,}",
                remedy="copy the file again; a process that was killed while it wrote leaves half of it",
            ) from None
        except ArgumentError:
            raise
        except (TypeError, KeyError, ValueError) as error:
            raise ArgumentError(
                expected="a pickle of plain data",
                received=f"{type(error).__name__} at byte {self.at:,}",
                remedy="use the file that torch wrote",
            ) from None

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        end = self.at + size
        if size < 0 or end > len(self.data):
            raise IndexError
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, size: int, signed: bool = False) -> int:
        """Return a little-endian integer."""
        return int.from_bytes(self.take(size), "little", signed=signed)

    def since_mark(self) -> list[Any]:
        """Take what was pushed since the last mark."""
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def last(self, kind: type) -> Any:
        """Return the container on top of the stack."""
        if type(self.stack[-1]) is not kind:
            raise TypeError
        return self.stack[-1]

    def _refuse(self, code: int) -> ArgumentError:
        name = NAMES.get(chr(code), f"byte {code:#04x}")
        if name in ("GLOBAL", "INST"):
            named = self.data[self.at : self.at + 200].split(b"\n")[:2]
            name += " " + ".".join(part.decode("utf-8", "replace") for part in named)
        elif name == "STACK_GLOBAL":
            name += " " + ".".join(str(part)[:100] for part in self.stack[-2:])
        return ArgumentError(
            expected="a pickle of dicts, lists, tuples, strings, numbers, bools and None only",
            received=f"{name} at byte {self.at - 1:,}, which no dump of torch has",
            remedy="do not open this file with Python's pickle; use a dump that torch wrote itself",
        )


def _push_memo(reader: ClosedReader, size: int) -> None:
    reader.stack.append(reader.memo[reader.number(size)])


def _memoize(reader: ClosedReader, size: int) -> None:
    reader.memo[reader.number(size)] = reader.stack[-1]


def _text(reader: ClosedReader, size: int) -> None:
    reader.stack.append(reader.take(reader.number(size)).decode("utf-8", "replace"))


def _tuple(reader: ClosedReader, size: int) -> None:
    taken = tuple(reader.stack[len(reader.stack) - size :])
    if len(taken) != size:
        raise IndexError
    del reader.stack[len(reader.stack) - size :]
    reader.stack.append(taken)


def _set_items(reader: ClosedReader) -> None:
    items = reader.since_mark()
    fields = reader.last(dict)
    for key, value in zip(items[::2], items[1::2], strict=True):
        fields[_as_key(key)] = value


def _set_item(reader: ClosedReader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    reader.last(dict)[_as_key(key)] = value


def _as_key(key: Any) -> str:
    """Return a key: a string, since the hash of nested tuples may take for ever."""
    if type(key) is not str:
        raise TypeError
    return key


def _append(reader: ClosedReader) -> None:
    value = reader.stack.pop()
    reader.last(list).append(value)


def _appends(reader: ClosedReader) -> None:
    items = reader.since_mark()
    reader.last(list).extend(items)


def _code(character: str) -> int:
    return ord(character)


STEPS: dict[int, Callable[[ClosedReader], object]] = {
    0x80: lambda r: r.take(1),  # PROTO
    0x95: lambda r: r.take(8),  # FRAME
    _code("("): lambda r: r.marks.append(len(r.stack)),
    _code("}"): lambda r: r.stack.append({}),
    _code("]"): lambda r: r.stack.append([]),
    _code(")"): lambda r: r.stack.append(()),
    _code("N"): lambda r: r.stack.append(None),
    0x88: lambda r: r.stack.append(True),
    0x89: lambda r: r.stack.append(False),
    _code("J"): lambda r: r.stack.append(r.number(4, signed=True)),
    _code("K"): lambda r: r.stack.append(r.number(1)),
    _code("M"): lambda r: r.stack.append(r.number(2)),
    0x8A: lambda r: r.stack.append(r.number(r.number(1), signed=True)),  # LONG1
    _code("G"): lambda r: r.stack.append(struct.unpack(">d", r.take(8))[0]),
    _code("X"): lambda r: _text(r, 4),
    0x8C: lambda r: _text(r, 1),  # SHORT_BINUNICODE
    _code("q"): lambda r: _memoize(r, 1),
    _code("r"): lambda r: _memoize(r, 4),
    0x94: lambda r: r.memo.__setitem__(len(r.memo), r.stack[-1]),  # MEMOIZE
    _code("h"): lambda r: _push_memo(r, 1),
    _code("j"): lambda r: _push_memo(r, 4),
    _code("t"): lambda r: r.stack.append(tuple(r.since_mark())),
    0x85: lambda r: _tuple(r, 1),
    0x86: lambda r: _tuple(r, 2),
    0x87: lambda r: _tuple(r, 3),
    _code("u"): _set_items,
    _code("s"): _set_item,
    _code("e"): _appends,
    _code("a"): _append,
}


def read_pickle(data: bytes) -> Any:
    """Return the plain data of a pickle; see `ClosedReader.load`."""
    return ClosedReader(data).load()
