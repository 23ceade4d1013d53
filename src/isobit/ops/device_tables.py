"""Small tables of integers on a device, made once: where samples begin, and how many rows they have.

[Note: tables without host waits]
A table that is copied from the host makes the host wait for the GPU, a table that is read on the host does too, and a
CUDA graph can capture neither. So a table is made once per description and device and kept, and it carries the numbers
that it was made of. A graph reads its tables when it is replayed: those that were used in a capture are kept for good.
A table is copied on the stream that was current when it was made; another stream waits for that copy, on the device.
What was not used for longest is dropped, without waiting: torch reuses memory in the order of the stream that it was
allocated on, and knows which other streams have used it. Numbers that are new at every step (the rows that each expert
has of a sample) are not kept; `split_table` copies them once.
Nothing is kept under a mode of torch (FakeTensorMode and others), a transform of torch.func or torch.compile, which
have tensors of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from isobit.errors import UnsupportedError

T = TypeVar("T")
MOST, MOST_BYTES = 1024, 1 << 26  # descriptions that are kept, and memory on all devices
_VALUES = "_isobit_values"
_is_initialized: Callable[[], bool] = torch.cuda.is_initialized
_made: dict[Hashable, Any] = {}
_captured: dict[Hashable, Any] = {}
_changing = threading.Lock()


def is_capturing() -> bool:
    """Return whether the current stream's work becomes part of a CUDA graph."""
    return _is_initialized() and torch.cuda.is_current_stream_capturing()


def makes_other_tensors() -> bool:
    """Return whether a tensor that is made now would be of no use later."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def kept(key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
    """Return what `make` returned for a key and a device before, or now.

    Raises:
        UnsupportedError: If it is not made yet, and a CUDA graph is being captured.
    """
    if makes_other_tensors():
        return make()
    place = (key, device)
    capturing = is_capturing()
    found = _made.get(place)
    is_new = found is None
    stream = (
        torch.cuda.current_stream(device) if device.type == "cuda" and _is_initialized() else None
    )
    if found is None:
        if capturing:
            refuse_capture("samples of new lengths")
        with torch.inference_mode(False):  # else it could not be saved for a backward
            value = make()
        written = None if stream is None else stream.record_event()
        found = (value, stream, written, sum(table.nbytes for table in tables_in(value)))
    with _changing:
        _made.pop(place, None)
        _made[place] = found  # behind all others
        if is_new:
            drop_oldest()
    value, writer, written, _ = found
    if capturing:
        _captured[place] = value  # torch.cuda.graph has waited for everything before
    elif stream is not None and written is not None and stream != writer:
        stream.wait_event(written)
        for table in tables_in(value):
            table.record_stream(stream)
    return value


def drop_oldest() -> None:
    """Drop the tables that were not used for longest, until the others are few and small enough."""
    size = sum(found[-1] for found in _made.values())
    while len(_made) > MOST or (size > MOST_BYTES and len(_made) > 1):
        size -= _made.pop(next(iter(_made)))[-1]


def tables_in(value: Any) -> list[Tensor]:
    """Return the tensors of a table, a tuple of tables, or an object that has tables as attributes."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    return [table for part in parts for table in tables_in(part)]


def refuse_capture(what: str) -> None:
    """Raise: what is copied from the host cannot be part of a CUDA graph."""
    raise UnsupportedError(
        expected="calls in a CUDA graph with samples whose tables are on the GPU already",
        received=f"{what}, inside a capture",
        remedy="run the step once before it is captured, with the same shapes and the same Samples",
    )


def refuse_in_capture(what: str) -> None:
    """Raise while a CUDA graph is captured: it would replay what the host read or counted in the capture.

    Raises:
        UnsupportedError: If a graph is being captured.
    """
    if is_capturing():
        raise UnsupportedError(
            expected="calls in a CUDA graph that depend on no number that the host reads or counts at every call",
            received=f"{what}, inside a capture",
            remedy="leave this call out of the graph: capture what comes before and after it, and call it in between",
        )


def copied(values: Sequence[Any], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 values on a device, without waiting for it; `values_of` knows them."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=torch.int64, device=device).reshape(shape)
    refuse_in_capture("a table that changes at every call, as of a KVCache")
    if device.type == "cuda" and torch.cuda.is_available():
        held = torch.tensor(values, dtype=torch.int64, device="cpu").reshape(shape).pin_memory()
        table = held.to(device, non_blocking=True)
    else:
        table = torch.tensor(values, dtype=torch.int64, device=device).reshape(shape)
    if not table.is_inference():
        setattr(table, _VALUES, (table._version, values, {}))
    return table


def table_of(values: tuple[Any, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an int64 table of values that is kept; nobody may write into it."""
    return kept((values, shape), device, lambda: copied(values, shape, device))


def split_table(values: Tensor, device: torch.device) -> list[Tensor]:
    """Return the tables along the first axis of an int64 tensor of the CPU, copied to a device at once and not kept."""
    if device.type == "cpu":
        return list(values.unbind())
    numbers = values.tolist()
    tables = list(copied(numbers, tuple(values.shape), device).unbind())
    for table, known in zip(tables, numbers, strict=True):
        setattr(table, _VALUES, (table._version, known, {}))
    return tables


def values_of(table: Tensor) -> Any:
    """Return the numbers of a table as they were given, or as nested lists where it was made elsewhere.

    Raises:
        UnsupportedError: If they must be read from a GPU while a graph is captured.
    """
    return derived_of(table, as_given)


def as_given(values: Any) -> Any:
    """Return values as they are."""
    return values


def derived_of(table: Tensor, derive: Callable[[Any], T]) -> T:
    """Return what `derive` makes of the numbers of a table, made once for a table that is kept.

    Raises:
        UnsupportedError: As `values_of`.
    """
    version, values, known = getattr(table, _VALUES, (None, None, None))
    if known is None or version != table._version:
        if is_capturing():
            refuse_capture("a table that isobit did not make")
        return derive(table.tolist())
    if derive not in known:
        known[derive] = derive(values)
    return known[derive]  # type: ignore[no-any-return]
