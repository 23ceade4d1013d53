"""Save what torch's DebugMode recorded as JSON lines, and read them.

[Note: The file]
One JSON object per line: `op`, `module`, `call` (number among calls of this operator in this module), `hash` (as
DebugMode computed it: a list of [path, text]), `shape` and `dtype` (one per tensor of the result). If outputs were
recorded with `DebugMode.record_outputs()`, also `digest`: BLAKE3 of all bits, one per tensor; and with `values=True`
`values`, keys of the tensors in the file `<name>.pt` beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isobit.comparing.dumps.debug_text import LogReader
from isobit.comparing.dumps.records import Entry, Output, Stored, Unreadable
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.plain_text import one_line

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
