"""Recognise the format of a dump and list its entries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from isobit.comparing.dumps.debug_log import read_debug_log, read_debug_text
from isobit.comparing.dumps.records import Dump, Entry, Stored, Unreadable
from isobit.comparing.dumps.tensor_files import SUFFIXES, TensorReader, UnreadableError
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.plain_text import one_line

LARGEST_LOG = 1 << 30  # bytes
# Tags of SGLang's dumper that number the file, or say nothing about the place.
_NUMBERING = ("dump_index", "name", "recompute_status")
_CALL = re.compile(r"(.+?)(?:[@#]|[._-]call[_-]?)(\d{1,9})")
_SHARD = re.compile(r"(?:pytorch_)?model(?:-\d+-of-\d+)?|.*-\d{5}-of-\d{5}")
_SINGLE = {"tensor", "value", "data", "output", "x", "0"}  # keys that say nothing
_DIGITS = re.compile(r"(\d+)")


def load_dump(path: Path) -> Dump:
    """List the entries of a dump; values of tensors are read later, when they are compared.

    Args:
        path: A log of DebugMode (text or JSON lines), a tensor file, or a folder of tensor files.

    Returns:
        The entries and what could not be read.

    Raises:
        ArgumentError: If there is no such file, or it has nothing that could be compared.
    """
    if path.is_dir():
        dump = _load_folder(path)
    elif path.suffix in SUFFIXES:
        dump = _dump_of(path, "tensor files", [path], ())
    else:
        dump = _load_log(path)
    if not dump.entries:
        reasons = "; ".join(f"{one.where}: {one.reason}" for one in dump.unreadable[:3])
        raise ArgumentError(
            expected="a DebugMode log, a tensor file, or a folder of .pt or .safetensors files",
            received=f"{one_line(str(path))} without entries"
            + (f" ({reasons})" if reasons else ""),
            remedy="write Path('a.txt').write_text(debug_mode.debug_string()), or use save_debug_log",
        )
    return dump


def _load_log(path: Path) -> Dump:
    try:
        text = files.read_bytes(path, LARGEST_LOG).decode("utf-8", errors="replace")
    except OSError as error:
        raise ArgumentError(
            expected="a file or folder that can be read",
            received=one_line(f"{path}: {error.strerror or error}"),
            remedy="check the path",
        ) from None
    if text.lstrip().startswith("{"):
        entries, unreadable = read_debug_log(text, path)
        return Dump(path, "DebugMode JSON lines", _numbered(entries), True, unreadable)
    entries, unreadable = read_debug_text(text)
    return Dump(path, "DebugMode text", entries, True, unreadable)


def _load_folder(path: Path) -> Dump:
    found = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES)
    tagged = {one: tags for one in found if (tags := read_tags(one.relative_to(path)))}
    if not tagged:
        return _dump_of(path, "tensor files", found, ())
    entries = []
    order = sorted(tagged, key=lambda one: (_index(tagged[one]), _rank(tagged[one]), str(one)))
    for one in order:
        tags = tagged[one]
        kept = tuple(sorted((k, v) for k, v in tags.items() if k not in _NUMBERING))
        name = tags["name"].removeprefix("non_intrusive__")
        entries.append(Entry(name, tags=kept, stored=Stored(one)))
    others = [
        Unreadable(str(one.relative_to(path)), "its name is not of SGLang's dumper")
        for one in found
        if one not in tagged
    ]
    return Dump(path, "SGLang dumper", _numbered(entries), True, tuple(others))


def read_tags(path: Path) -> dict[str, str]:
    """Return the key=value parts of a dumper's file name, or nothing if it is not of a dumper.

    Args:
        path: The file, relative to the folder of the dump; a name with slashes is in folders.

    Returns:
        All parts, if one of them is `name`.

    Example:
        >>> from pathlib import Path
        >>> from isobit.comparing.dumps.load import read_tags
        >>> read_tags(Path("step=0___rank=1___dump_index=3___name=attn___layer_id=2.pt"))["layer_id"]
        '2'
    """
    found = re.search(r"(?:^|/)(\w+=.*)$", path.with_suffix("").as_posix(), re.DOTALL)
    tags: dict[str, str] = {}
    last = ""
    for part in found[1].split("___") if found else ():
        key, mark, value = part.partition("=")
        if mark and key.isidentifier():
            tags[last := key] = value
        elif last:  # three underscores inside a value
            tags[last] += f"___{part}"
    return tags if "name" in tags else {}


def _dump_of(
    path: Path, form: str, found: Iterable[Path], unreadable: tuple[Unreadable, ...]
) -> Dump:
    """List the tensors of files that are named by tensor, in the order of their names."""
    reader, entries, wrong = TensorReader(), [], list(unreadable)
    for one in found:
        try:
            keys = reader.keys(one)
        except UnreadableError as error:
            wrong.append(Unreadable(str(one.relative_to(path) if one != path else one), str(error)))
            continue
        whole = one == path
        stem = "" if whole else one.relative_to(path).with_suffix("").as_posix()
        if not keys:
            entries.append(_named(stem or one.stem, Stored(one)))
        for key in keys:
            own = whole or bool(_SHARD.fullmatch(stem))
            single = not own and len(keys) == 1 and (key in _SINGLE or key == stem)
            entries.append(
                _named(key if own else stem if single else f"{stem}.{key}", Stored(one, (key,)))
            )
    entries.sort(key=lambda e: (_natural(e.module), [_natural(value) for _, value in e.tags]))
    return Dump(path, form, _numbered(entries), False, tuple(wrong))


def _named(name: str, stored: Stored) -> Entry:
    """Return the entry of a tensor's name; a call number such as `mlp@2` becomes a tag."""
    found = _CALL.fullmatch(name)
    if not found:
        return Entry(name, stored=stored)
    return Entry(found[1], tags=(("call", str(int(found[2]))),), stored=stored)


def _numbered(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Give every entry its position and the number of its call, so that no two entries have one key."""
    calls: Counter[object] = Counter()
    found = []
    for position, entry in enumerate(entries):
        place = (entry.module, entry.operator, entry.tags)
        found.append(replace(entry, call=calls[place], position=position))
        calls[place] += 1
    return tuple(found)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort layers.10 after layers.9."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part)
        for part in _DIGITS.split(name)
    ]


def _index(tags: dict[str, str]) -> int:
    return _whole(tags.get("dump_index", ""))


def _rank(tags: dict[str, str]) -> int:
    return _whole(tags.get("rank", ""))


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
