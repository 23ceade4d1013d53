"""Open traces of torch.profiler, and decode their JSON as a stream.

Files, gzip files, tar archives and folders of them are read in pieces of a megabyte and decoded one event at a time,
so that a file of gigabytes needs memory for one event.
"""

from __future__ import annotations

import codecs
import json
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, cast

from isobit.errors import ArgumentError
from isobit.foundation.files import open_regular

# Decode a trace's JSON as a stream, one event at a time, so that a file of gigabytes needs memory
# for one event.
#
# [Note: Numbers of a trace]
# Timestamps are microseconds since some date, such as 1712195495506161.2. Multiplied by 1,000 in
# float64 they lose up to 0.3 µs, so fractions stay text (`parse_float=str`) until `nanoseconds`
# turns them into an integer without rounding through a float. NaN and Infinity, which JSON does not
# have and profilers write, become None: harmless in an argument that is not used, and an error
# where a time is expected.

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


CHUNK = 1 << 20
LARGEST = 16 << 30  # bytes of a trace's JSON
MOST_FILES = 4096
# Traces shrink to a tenth or a thirtieth. A file that expands further than this is made to fill a memory or a disk.
MOST_EXPANSION, SMALL = 400, 64 << 20
ENDINGS = (".json", ".json.gz", ".trace", ".trace.gz")


@dataclass
class Source:
    """One trace: its name and its JSON in pieces."""

    name: str
    chunks: Iterator[bytes]


def find_sources(path: Path) -> Iterator[Source]:
    """Yield the traces of a file, a tar archive or a folder, by name.

    Raises:
        ArgumentError: If there is none, or a file is damaged or expands without end.
        OSError: If it cannot be read.
    """
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(ENDINGS))
        if not files:
            raise refuse(str(path), "a folder with traces", f"no file named *{', *'.join(ENDINGS)}")
        if len(files) > MOST_FILES:
            raise refuse(str(path), f"at most {MOST_FILES} traces", f"{len(files)} files")
        for file in files:
            yield from sources_of_file(file)
    else:
        yield from sources_of_file(path)


def sources_of_file(path: Path) -> Iterator[Source]:
    """Yield the one trace of a file, or those of a tar archive."""
    with open_regular(path) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        size = path.stat().st_size
        stream = Bounded(unpacked(file, path.name) if packed else pieces(file), path.name, size)
        first = stream.take(512)
        if first[257:262] == b"ustar":
            stream.put_back(first)
            yield from sources_of_archive(stream, path.name)
        else:
            stream.put_back(first)
            yield Source(path.name, iter(stream))


def sources_of_archive(stream: Bounded, name: str) -> Iterator[Source]:
    """Yield the traces of a tar archive one after the other; links, devices and other files are left out."""
    found = 0
    try:
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as archive:
            for member in archive:
                if member.isreg() and member.name.endswith(ENDINGS):
                    found += 1
                    if found > MOST_FILES:
                        raise refuse(name, f"at most {MOST_FILES} traces", "more")
                    file = archive.extractfile(member)
                    assert file is not None  # of a regular file
                    label = f"{name}:{Path(member.name).name}"
                    if member.name.endswith(".gz"):
                        inner = Bounded(unpacked(file, label), label, member.size)
                        yield Source(label, iter(inner))
                    else:
                        yield Source(label, pieces(file))
    except tarfile.TarError as error:
        raise refuse(name, "a tar archive of traces", str(error)[:80]) from None
    if not found:
        raise refuse(name, "an archive with traces", f"no member named *{', *'.join(ENDINGS)}")


class Bounded:
    """Pieces of a file, counted: too many bytes, or too many for the size on disk, are an error."""

    def __init__(self, chunks: Iterator[bytes], name: str, size: int) -> None:
        self.chunks, self.name, self.size = chunks, name, max(size, 1)
        self.kept, self.count = b"", 0

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.take(CHUNK):
            yield piece

    def put_back(self, data: bytes) -> None:
        """Return bytes that were read ahead."""
        self.kept = data + self.kept

    def read(self, size: int) -> bytes:
        """Read as a file would: tarfile asks so."""
        return self.take(size)

    def take(self, size: int) -> bytes:
        """Return this many bytes, or fewer at the end."""
        parts, got = [self.kept], len(self.kept)
        while got < size:
            piece = next(self.chunks, b"")
            if not piece:
                break
            self.count += len(piece)
            if self.count > LARGEST:
                raise refuse(self.name, f"at most {LARGEST:,} bytes of JSON", "more")
            if self.count > SMALL and self.count > MOST_EXPANSION * self.size:
                raise refuse(
                    self.name,
                    f"a file that expands at most {MOST_EXPANSION}-fold",
                    f"{self.size:,} bytes that expand to more than {self.count:,}",
                )
            parts.append(piece)
            got += len(piece)
        whole = b"".join(parts)
        self.kept = whole[size:]
        return whole[:size]


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file in pieces."""
    while piece := file.read(CHUNK):
        yield piece


def unpacked(file: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield what a gzip file contains, in pieces of limited size, all its members."""
    reader = zlib.decompressobj(wbits=31)
    fed = False
    for packed in pieces(file):
        while packed:
            try:
                piece = reader.decompress(packed, CHUNK)
            except zlib.error as error:
                raise refuse(name, "a gzip file", str(error)[:80]) from None
            fed = True
            if piece:
                yield piece
            packed = reader.unconsumed_tail
            if reader.eof:
                packed = reader.unused_data
                fed = False
                if packed.strip(b"\0"):
                    reader = zlib.decompressobj(wbits=31)
                else:
                    break
    if fed and not reader.eof:
        raise refuse(name, "a gzip file", "a file that ends early")
