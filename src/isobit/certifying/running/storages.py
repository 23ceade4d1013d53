"""The memory of one run: storages of torch as buffers of the machine, every element with a name.

[Note: names of inputs]
An element of a float input is named by its tensor (see [Note: identity of inputs] in watch.py), the place of its view
in that tensor, the label of its row, and its index without the row. With one label for all rows, equal rows have equal
names wherever they are. With different labels, a value that came from another row shows. Integers are named by their
value: the certificate takes them as they are. Memory that nobody has initialised gets names of its own in every run, so
that a result that depends on it never equals another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3

from isobit.certifying.judging.row_axes import RowAxis
from isobit.certifying.machine import Buffer, Pointer
from isobit.certifying.names import names
from isobit.certifying.running.exposed import check_copies, check_unchanged, is_exposed, key_of
from isobit.certifying.running.watch import Watch, storage_of
from isobit.errors import UnsupportedError

Names = names.Names
ALIGNED = 256  # bytes


@dataclass(frozen=True)
class Placed:
    """A view of a storage: which axis counts rows, and where in the storage it is, as text without rows."""

    axis: RowAxis | None
    place: str = ""


class Inputs(Protocol):
    """What is known about the inputs of a configuration before it is executed."""

    def place(self, key: str, tensor: torch.Tensor) -> Placed:
        """Return the rows and the place of a view; raise an error if other row counts have no such view."""

    def fill(self, key: str, tensor: torch.Tensor) -> None:
        """Give an input the values that it has in the largest configuration."""

    def argument(self, key: str, tensor: torch.Tensor) -> str:
        """Return the parameter of a kernel that a view was first passed as."""


@dataclass(frozen=True)
class Arrangement:
    """How integers of rows are arranged in one run: floats follow by their labels.

    Attributes:
        order: the row that is put at each position; as they are if empty.
        changed: positions whose integers are changed, to see that other rows do not depend on them.
        by: what is added to them; booleans are negated.
    """

    order: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    by: int = 0

    def apply(self, tensor: torch.Tensor, axis: RowAxis, rows: int) -> None:
        """Arrange the integers of a tensor in place."""
        each: torch.Tensor = torch.unflatten(tensor.movedim(axis.axis, 0), 0, (rows, axis.per_row))
        if self.order:
            each.copy_(each[list(self.order)].clone())
        if self.changed:
            part = each[list(self.changed)]
            each[list(self.changed)] = ~part if tensor.dtype is torch.bool else part + self.by


@dataclass
class Held:
    """One storage: its bytes, the names of its halves now and at the start, and which elements have one."""

    tensor: torch.Tensor  # keeps the storage alive
    key: str
    data: np.ndarray[Any, np.dtype[np.uint8]]
    names: Names
    first: Names
    named: np.ndarray[Any, np.dtype[np.bool_]]  # per byte
    before: bytes | None  # the content of a storage from outside, which is put back
    after: bytes | None = None  # what it held when it was put back
    uninitialised: bool = False
    integers: np.ndarray[Any, np.dtype[np.bool_]] | None = None  # halves of integer tensors
    buffer: Buffer | None = None  # of the current launch

    @property
    def written(self) -> bool:
        """Whether a kernel stored something here."""
        return not np.array_equal(self.names, self.first)


@dataclass(frozen=True)
class NamedView:
    """A float input whose elements were named: for descriptions of expressions."""

    argument: str
    shape: tuple[int, ...]
    axis: RowAxis | None
    names: Names


@dataclass
class Storages:
    """All storages that kernels of one run were given."""

    watch: Watch
    inputs: Inputs
    labels: np.ndarray[Any, np.dtype[np.uint64]]  # of the row at every position
    nonce: int = 0
    arrangement: Arrangement = field(default_factory=Arrangement)
    describe: bool = False  # whether named views are kept, to describe expressions
    named_views: list[NamedView] = field(default_factory=list)
    integers: list[list[bytes]] = field(default_factory=list)  # per integer input: content by row
    held: dict[int, Held] = field(default_factory=dict)
    views: set[tuple[Any, ...]] = field(default_factory=set)  # layouts that were named
    left: dict[int, bytes] = field(default_factory=dict)  # digests of content after a launch
    earlier: Storages | None = None  # of the call before this one

    def knows(self, storage: int) -> bool:
        """Tell whether a storage was an argument of a launch."""
        return storage in self.held

    def wrote(self, storage: int) -> bool:
        """Tell whether a kernel wrote a storage."""
        return storage in self.held and self.held[storage].written

    def arguments(
        self, values: Sequence[Any], texts: Sequence[str]
    ) -> list[Buffer | Pointer | int | float]:
        """Return the arguments of a launch; views of one storage are pointers into one buffer."""
        self.start_launch()
        starts: dict[int, list[int]] = {}
        for value in values:
            if isinstance(value, torch.Tensor) and value.numel():
                starts.setdefault(storage_of(value), []).append(first_byte(value))
        # A buffer of several views begins at a multiple of what vector accesses are aligned to.
        first = {
            storage: found[0] if len(set(found)) == 1 else min(found) // ALIGNED * ALIGNED
            for storage, found in starts.items()
        }
        return [
            self.buffer(value, text, first.get(storage_of(value), 0))
            if isinstance(value, torch.Tensor)
            else value
            for value, text in zip(values, texts, strict=True)
        ]

    def buffer(self, tensor: torch.Tensor, text: str, begin: int) -> Buffer | Pointer:
        """Return a tensor's first element in the buffer that begins at a byte of its storage; elements are named."""
        if not tensor.numel():
            return Buffer(np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.uint64))
        storage = storage_of(tensor)
        held = self.hold(tensor, text)
        if storage in self.left:
            check_unchanged(text, self.left[storage], fingerprint(held))
        self.name_view(held, tensor)
        start = first_byte(tensor)
        if start % 2:
            raise UnsupportedError(
                expected="tensors that begin at an even byte of their memory",
                received=f"a view of {list(tensor.shape)} that begins at byte {start}",
                remedy="pass a tensor of its own, such as view.clone()",
            )
        if held.buffer is None:
            marks = None if held.integers is None else held.integers[begin // 2 :]
            held.buffer = Buffer(held.data[begin:], held.names[begin // 2 :], integers=marks)
        return held.buffer if start == begin else Pointer(held.buffer, start - begin)

    def start_launch(self) -> None:
        """Forget the buffers of the launch before: a launch is ordered after it, so no race joins the two."""
        for held in self.held.values():
            stored = None if held.buffer is None else held.buffer.integers
            if stored is not None and held.integers is None:  # a kernel stored integers there
                held.integers = np.zeros(len(held.names), dtype=bool)
                held.integers[-len(stored) :] = stored
            held.buffer = None

    def end_launch(self) -> None:
        """Remember what storages hold: only kernels may change it before the next launch."""
        for storage, held in self.held.items():
            if held.buffer is not None:
                self.left[storage] = fingerprint(held)

    def hold(self, tensor: torch.Tensor, text: str) -> Held:
        """Return the record of a tensor's storage.

        Raises:
            UnsupportedError: If two storages that the function keeps cannot be told apart.
        """
        storage = storage_of(tensor)
        if storage not in self.held:
            check_copies(self.watch, tensor, text)
            key = key_of(self.watch, tensor, text)
            if key.startswith("kept") and any(held.key == key for held in self.held.values()):
                raise UnsupportedError(
                    expected="tensors that the function keeps between calls to be told apart",
                    received=f"two of {key.removeprefix('kept ')}",
                    remedy="make them in the function, or before it is called",
                )
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            data = whole.numpy()
            empty = key.startswith("scratch") and storage not in self.watch.filled
            if empty:
                data[:] = 0xFF  # NaN, so that a kernel that reads it gives no plausible number
            made_here = storage in self.watch.made and not is_exposed(self.watch, storage)
            before = None if made_here else data.tobytes()
            halves = self.anonymous(key, (len(data) + 1) // 2, empty)
            known = np.zeros(len(data), dtype=bool)
            left = None if self.earlier is None else self.earlier.left_behind().get(storage)
            if left is not None:
                data[:] = np.frombuffer(left.after, dtype=np.uint8)  # type: ignore[arg-type]
                halves, known[:] = left.names.copy(), True
            # What is left behind counts as written: this call may write the same again.
            first = halves.copy() if left is None else ~halves
            self.held[storage] = Held(
                tensor, key, data, halves, first, known, before, uninitialised=empty
            )
        return self.held[storage]

    def anonymous(self, key: str, count: int, empty: bool) -> Names:
        """Return names of halves by their place in the storage, for elements that no view names."""
        salt = f" run {self.nonce}" if empty else ""
        operation = names.tag(f"input {key}{salt} by place")
        return np.asarray(names.VALUE | names.mix(operation, np.arange(count, dtype=np.uint64)))

    def name_view(self, held: Held, tensor: torch.Tensor) -> None:
        """Name the elements of a view that have no name yet; what a kernel has written keeps its name."""
        layout = (storage_of(tensor), *layout_of(tensor))
        if layout in self.views or held.uninitialised or not tensor.numel():
            return
        self.views.add(layout)
        size = tensor.element_size()
        places = element_places(tensor)
        kept = held.names == held.first  # what a kernel has written keeps its name
        fresh = ~held.named[places * size] & kept[places * size // 2]
        if not fresh.any():
            return
        self.inputs.fill(held.key, tensor)
        made = self.symbols(held, tensor, bool(fresh.all()))
        places = places[fresh]
        if made is not None:
            write_halves(held.names, places, made[fresh], size)
        else:
            odd = len(held.data) % 2  # the machine puts a zero after the last byte
            raw = np.append(held.data, np.zeros(odd, np.uint8)).view(np.uint16)
            halves = np.unique((places * size)[:, None] + np.arange(0, size, 2)) // 2
            held.names[halves] = names.fixed_half(raw[halves])
            if not tensor.dtype.is_floating_point:
                if held.integers is None:
                    held.integers = np.zeros(len(held.names), dtype=bool)
                held.integers[halves] = True
        halves = np.unique(((places * size)[:, None] + np.arange(size)) // 2)
        held.first[halves] = held.names[halves]
        held.named[(places * size)[:, None] + np.arange(size)] = True

    def symbols(self, held: Held, tensor: torch.Tensor, fresh: bool) -> Names | None:
        """Return the names of a tensor's elements, or None if each is to be named by its value."""
        floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        try:
            placed = self.inputs.place(held.key, tensor)
        except UnsupportedError:
            # Scratch that torch filled with one number has that number, whatever its shape.
            if self.watch.is_constant(storage_of(tensor)) or not floats:
                return None
            raise
        axis = placed.axis
        if floats or self.watch.was_floats(storage_of(tensor)):
            made = self.element_names(f"{held.key} at {placed.place}", tensor, axis)
            if self.describe:
                argument = self.inputs.argument(held.key, tensor)
                self.named_views.append(NamedView(argument, tuple(tensor.shape), axis, made))
            return made
        if axis is not None:
            if fresh:
                self.arrangement.apply(tensor, axis, len(self.labels))
            rows = tensor.movedim(axis.axis, 0).reshape(len(self.labels), -1)
            self.integers.append([row.numpy().tobytes() for row in rows])
        return None

    def element_names(self, label: str, tensor: torch.Tensor, found: RowAxis | None) -> Names:
        """Return the names of a float tensor's elements, flat in the order of its own index."""
        bits = 8 * tensor.element_size()
        parts: list[Any] = [names.tag(f"input {label} of {bits} bits")]
        axes = tensor.dim()
        for axis, length in enumerate(tensor.shape):
            index = np.arange(length, dtype=np.uint64)
            if tensor.stride(axis) == 0:
                index[:] = 0  # expanded: one element, whatever the length
            shape = [1] * axes
            shape[axis] = length
            if found is not None and axis == found.axis:
                row = index // np.uint64(found.per_row)
                parts.append(self.labels[row.astype(np.int64)].reshape(shape))
                index = index % np.uint64(found.per_row)
            parts.append(index.reshape(shape))
        made = names.mix(*parts)
        return np.broadcast_to(made, tuple(tensor.shape)).reshape(-1)

    def snapshot(self) -> list[tuple[Held, bytes, Names, Any]]:
        """Return what storages hold before a launch, so that it can be run again."""
        return [
            (
                held,
                held.data.tobytes(),
                held.names.copy(),
                None if held.integers is None else held.integers.copy(),
            )
            for held in self.held.values()
            if held.buffer is not None
        ]

    @staticmethod
    def put_back(kept: list[tuple[Held, bytes, Names, Any]]) -> None:
        """Put back what storages held before a launch."""
        for held, data, named, integers in kept:
            held.data[:] = np.frombuffer(data, dtype=np.uint8)
            held.names[:] = named
            if held.integers is not None:
                held.integers[:] = integers

    def left_behind(self) -> dict[int, Held]:
        """Return the storages from outside that kernels wrote: the next call finds them so."""
        return {
            storage: held
            for storage, held in self.held.items()
            if held.after is not None and held.written
        }

    def restore(self) -> None:
        """Put back the content of storages that the function did not make."""
        for held in self.held.values():
            if held.before is not None:
                held.after = held.data.tobytes()
                held.data[:] = np.frombuffer(held.before, dtype=np.uint8)


def fingerprint(held: Held) -> bytes:
    """Return a digest of what a storage holds."""
    return blake3(held.data.data).digest()


def first_byte(tensor: torch.Tensor) -> int:
    """Return the byte of its storage where a tensor begins."""
    return int(tensor.storage_offset()) * tensor.element_size()


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what tells two views of one storage apart."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def element_places(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the place of every element in its storage, in elements, flat in the order of the tensor's index."""
    places = np.full((1,) * tensor.dim(), tensor.storage_offset(), dtype=np.int64)
    for axis, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[axis] = length
        places = places + (np.arange(length, dtype=np.int64) * stride).reshape(shape)
    return places.reshape(-1)


def write_halves(
    halves: Names, places: np.ndarray[Any, np.dtype[np.int64]], made: Names, size: int
) -> None:
    """Write the names of elements of `size` bytes into the names of halves."""
    if size == 4:
        halves[2 * places], halves[2 * places + 1] = names.split(made)
    elif size == 2:
        halves[places] = names.half16(made)
    elif size == 1:
        for odd in (0, 1):  # two elements may be the two bytes of one half
            mine = (places & 1) == odd
            half, new = places[mine] // 2, made[mine]
            other = names.byte_of(halves[half], 1 - odd)
            halves[half] = names.half_of_bytes(*((other, new) if odd else (new, other)))
    else:
        for part in range(size // 2):
            halves[places * (size // 2) + part] = names.VALUE | names.mix(made, np.uint64(part))


def read_halves(halves: Names, places: np.ndarray[Any, np.dtype[np.int64]], size: int) -> Names:
    """Return one name per element from the names of its halves."""
    if size == 4:
        return names.join(halves[2 * places], halves[2 * places + 1])
    if size == 2:
        return names.value16(halves[places])
    if size == 1:
        found = halves[places // 2]
        return np.where(places & 1, names.byte_of(found, 1), names.byte_of(found, 0))
    parts = [halves[places * (size // 2) + part] for part in range(size // 2)]
    return names.mix(*parts)
