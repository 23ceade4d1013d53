"""Save what torch's DebugMode recorded as JSON lines, and read them.

[Note: The file]
One JSON object per line: `op`, `module`, `call` (number among calls of this operator in this module), `hash` (as
DebugMode computed it: a list of [path, text]), `shape` and `dtype` (one per tensor of the result). If outputs were
recorded with `DebugMode.record_outputs()`, also `digest`: BLAKE3 of all bits, one per tensor; and with `values=True`
`values`, keys of the tensors in the file `<name>.pt` beside it.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from isobit.comparing.dumps.align import without_address
from isobit.comparing.dumps.records import Entry, Output, Stored, Unreadable
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.plain_text import one_line

# Read the text of torch's `DebugMode.debug_string()`: one call per line, indented by depth.
#
# [Note: Depth and modules]
# With `record_nn_module`, a module that is entered is a line of its own, and calls in it are
# indented further. A line `ns::op(...)` inside a module is two spaces deeper than the module's
# line; calls of `record_torchfunction` (names without `::`) are as deep as the module's line. A
# module therefore ends at the first line that is not deeper than it.

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
        >>> from isobit.comparing.dumps.debug_log import read_debug_text
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


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def save_debug_log(debug_mode: Any, path: str | Path, *, values: bool = False) -> None:
    """Write the calls that a DebugMode has recorded as JSON lines, one line per call.

    With `DebugMode.record_outputs()` open during the run, each line also has digests of all bits of the results,
    which unlike DebugMode's hashes see every difference.

    Args:
        debug_mode: A `torch.utils._debug_mode.DebugMode` after its run.
        path: The file to write.
        values: Whether to write the recorded outputs to `<path>.pt` too, so that ulps and rows can be compared.

    Raises:
        ArgumentError: If `debug_mode` has no calls, or `values` is set and no outputs were recorded.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torch.utils._debug_mode import DebugMode
        >>> from isobit.comparing.dumps import save_debug_log
        >>> with DebugMode() as debug_mode, DebugMode.record_outputs():
        ...     _ = torch.ones(2).neg()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_debug_log(debug_mode, Path(folder) / "a.jsonl")
        ...     (Path(folder) / "a.jsonl").read_text().count("aten::neg")
        1
    """
    path = Path(path)
    calls = list(getattr(debug_mode, "operators", ()))
    if not calls:
        raise ArgumentError(
            expected="a DebugMode that has recorded calls",
            received=f"{type(debug_mode).__name__} without calls",
            remedy="run the model inside `with DebugMode(record_nn_module=True) as debug_mode:`",
        )
    attributes = getattr(debug_mode, "record_tensor_attributes", [])
    reader, lines, tensors = LogReader(), [], {}
    for call in calls:
        before = len(reader.entries)
        reader.read(("  " + "  " * call.call_depth + call.render(attributes)).split("\n"))
        if len(reader.entries) > before:
            entry, outputs = reader.entries[before], dict(_recorded(call))
            stored = {f"{entry.position}.{name}": tensor for name, tensor in outputs.items()}
            lines.append(_line(entry, call, outputs, list(stored) if values else []))
            tensors.update(stored)
    if values:
        _save_values(tensors, path)
    files.write_text(path, "".join(line + "\n" for line in lines))


def read_debug_log(text: str, path: Path) -> tuple[tuple[Entry, ...], tuple[Unreadable, ...]]:
    """Return the entries of a file that `save_debug_log` wrote, and what could not be read.

    Args:
        text: The contents of the file.
        path: Its path, beside which values are looked for.

    Returns:
        The entries in order, and the lines that are not such records.
    """
    entries: list[Entry] = []
    unreadable: list[Unreadable] = []
    values = path.with_name(path.name + ".pt")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                entries.append(_entry(json.loads(line), len(entries), values))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                reason = f"{type(error).__name__}: {one_line(str(error))[:80]}"
                unreadable.append(Unreadable(f"line {number}", reason))
    return tuple(entries), tuple(unreadable)


def _recorded(call: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that `record_outputs` has kept, with their paths in the result."""
    import torch

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield path or "0", value
        elif isinstance(value, tuple | list):
            for at, one in enumerate(value):
                yield from walk(one, f"{path}.{at}" if path else str(at))
        elif isinstance(value, dict):
            for key, one in value.items():
                yield from walk(one, f"{path}.{key}" if path else str(key))

    return walk((getattr(call, "record", None) or {}).get("output"), "")


def _line(entry: Entry, call: Any, outputs: dict[str, Any], values: list[str]) -> str:
    from isobit import bits

    found: dict[str, Any] = {
        "op": entry.operator,
        "module": entry.module,
        "call": entry.call,
        "hash": entry.hashes,
        "shape": [output.shape for output in entry.outputs],
        "dtype": [output.dtype for output in entry.outputs],
    }
    if outputs:
        found["digest"] = [[name, bits.digest(_local(one))] for name, one in outputs.items()]
    if values:
        found["values"] = values
    trace = getattr(call, "fwd_stack_trace", None) or getattr(call, "stack_trace", None) or ""
    frames = [f for f in _FRAME.findall(trace) if "/torch/" not in f[0].replace("\\", "/")]
    if frames:
        found["source"] = ":".join(frames[-1])
    return json.dumps(found)


def _local(tensor: Any) -> Any:
    """Return a rank's own part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _save_values(tensors: dict[str, Any], path: Path) -> None:
    import torch

    if not tensors:
        raise ArgumentError(
            expected="recorded outputs for values=True",
            received="a DebugMode without them",
            remedy="run inside `with DebugMode.record_outputs():` too, or leave values out",
        )
    kept = {name: _local(one).detach().cpu().contiguous().clone() for name, one in tensors.items()}
    partial = path.with_name(f".{path.name}.pt.partial")
    torch.save(kept, partial)
    partial.replace(path.with_name(path.name + ".pt"))


def _entry(found: Any, position: int, values: Path) -> Entry:
    shapes = [None if one is None else tuple(int(size) for size in one) for one in found["shape"]]
    outputs = [
        Output(str(dtype), shape) for dtype, shape in zip(found["dtype"], shapes, strict=True)
    ]
    keys = tuple(str(key) for key in found.get("values", ()))
    return Entry(
        module=str(found["module"]),
        operator=str(found["op"]),
        call=int(found["call"]),
        position=position,
        outputs=tuple(outputs),
        hashes=tuple((str(name), str(value)) for name, value in found.get("hash", ())),
        digests=tuple((str(name), str(value)) for name, value in found.get("digest", ())),
        stored=Stored(values, keys) if keys else None,
        source=str(found.get("source", "")),
    )
