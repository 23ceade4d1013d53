"""Open traces: files, gzip files, tar archives and folders of them, in pieces of a megabyte."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from isobit.foundation.files import open_regular
from isobit.profiling.reading.json_stream import refuse

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
