"""Decode a trace's JSON as a stream, one event at a time, so that a file of gigabytes needs memory for one event.

[Note: Numbers of a trace]
Timestamps are microseconds since some date, such as 1712195495506161.2. Multiplied by 1,000 in float64 they lose up to
0.3 µs, so fractions stay text (`parse_float=str`) until `nanoseconds` turns them into an integer without rounding
through a float. NaN and Infinity, which JSON does not have and profilers write, become None: harmless in an argument
that is not used, and an error where a time is expected.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from isobit.errors import ArgumentError

LARGEST_VALUE = 64 << 20  # characters of one event, or of one entry of the header
LARGEST_TIME = 1 << 52  # microseconds: 142 years
SPACE = re.compile(r"[ \t\n\r]*")
BETWEEN = re.compile(r"[ \t\n\r]*,[ \t\n\r]*(?=\{)")  # two events
DECODER = json.JSONDecoder(strict=False, parse_float=str, parse_constant=lambda _: None)


def refuse(name: str, expected: str, received: str, remedy: str = "") -> ArgumentError:
    """Return the error for a file that is no trace."""
    return ArgumentError(
        expected=f"{name}: {expected}",
        received=received,
        remedy=remedy or "use a file that torch.profiler's export_chrome_trace wrote to its end",
    )


class JsonStream:
    """The top-level entries of one JSON document, and the items of its list of events."""

    def __init__(self, chunks: Iterator[bytes], name: str) -> None:
        self.name, self.chunks = name, chunks
        # A kernel's name may have bytes that are not UTF-8; the times beside it are still right.
        self.decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self.text, self.at, self.ended = "", 0, False

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Yield (key, value) of the header, and ("", event) for each event.

        Raises:
            ArgumentError: If the text is not JSON, is nested too deeply, ends early or has a value that is too large.
        """
        opening = self.symbol("{[")
        if opening == "[":
            yield from self.events()
        else:
            while self.peek() != "}":
                key = self.value()
                if not isinstance(key, str):
                    raise self.wrong("a key that is text", type(key).__name__)
                self.symbol(":")
                if key == "traceEvents":
                    self.symbol("[")
                    yield from self.events()
                else:
                    yield key, self.value()
                if self.peek() == ",":
                    self.at += 1
                    if self.peek() == "}":
                        raise self.wrong("a key after the comma", "'}'")
                elif self.peek() != "}":
                    raise self.wrong("',' or '}'", repr(self.peek()))
            self.at += 1
        if self.peek():
            raise self.wrong("nothing after the end of the JSON", repr(self.peek()))

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield the items of a list whose bracket was read."""
        if self.peek() == "]":
            self.at += 1
            return
        while True:
            yield "", self.value()
            between = BETWEEN.match(self.text, self.at)  # the usual case, in one match
            if between is not None:
                self.at = between.end()
            elif self.symbol(",]") == "]":
                return

    def symbol(self, allowed: str) -> str:
        """Read one of these characters."""
        found = self.peek()
        if not found or found not in allowed:
            raise self.wrong(f"one of {allowed}", repr(found) if found else "the end of the file")
        self.at += 1
        return found

    def peek(self) -> str:
        """Return the next character that is no white space, or nothing at the end."""
        while True:
            self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more(1):
                return ""

    def value(self) -> Any:
        """Decode the next value, with as much of the file as it needs."""
        if not self.text.startswith("{", self.at):
            self.peek()
        while True:
            try:
                found, end = DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if len(self.text) - self.at > LARGEST_VALUE or not self.more(1 + len(self.text)):
                    at_end = self.ended and error.pos >= len(self.text) - 1
                    received = "the end of the file" if at_end else error.msg
                    raise self.wrong("JSON", received) from None
            except RecursionError:
                raise self.wrong("values nested less deeply", "a nesting without end") from None
            except ValueError as error:  # an integer of thousands of digits
                raise self.wrong("numbers of at most 4,300 digits", str(error)[:80]) from None
            else:
                # A number at the end of what was read may go on.
                if end < len(self.text) or not self.more(1):
                    self.at = end
                    return found

    def more(self, characters: int) -> bool:
        """Read at least this many characters more; return False at the end of the file."""
        parts, got = [self.text[self.at :]], 0
        while got < characters and not self.ended:
            chunk = next(self.chunks, b"")
            text = self.decode(chunk, not chunk)
            self.ended = not chunk
            parts.append(text)
            got += len(text)
        self.text, self.at = "".join(parts), 0
        return got > 0

    def wrong(self, expected: str, received: str) -> ArgumentError:
        """Return the error for this file."""
        return refuse(self.name, expected, received)


def nanoseconds(value: Any) -> int | None:
    """Return microseconds, an integer or the text of a fraction, as nanoseconds; None if they are no time."""
    if type(value) is int:
        return value * 1000 if -LARGEST_TIME < value < LARGEST_TIME else None
    if type(value) is not str or len(value) > 60:
        return None
    whole, dot, part = value.partition(".")
    if dot and whole.isdecimal() and part.isdecimal() and len(part) <= 3 and len(whole) < 17:
        return int(whole) * 1000 + int((part + "00")[:3])
    try:
        exact = Decimal(value)
        if not exact.is_finite() or not -LARGEST_TIME < exact < LARGEST_TIME:
            return None
        return round(exact * 1000)
    except ArithmeticError:
        return None
