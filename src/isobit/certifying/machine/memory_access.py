"""How opcodes read and write memory."""

from __future__ import annotations

import numpy as np

from isobit.certifying.machine import memory, registers
from isobit.certifying.machine.memory import Buffer, Shared
from isobit.certifying.machine.races import Access, Races
from isobit.certifying.machine.registers import IntegerBits, RegisterAccess
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names, byte_of, half_of_bytes
from isobit.certifying.ptx.program import Address, Operand, Register
from isobit.certifying.running.refusals import (
    AddressError,
    DataAddressError,
    RaceError,
    refuse,
    unknown,
)


class MemoryAccess(RegisterAccess):
    """What opcodes use to read and write memory."""

    buffers: list[Buffer]
    bases: Array  # the addresses of the buffers
    shared: Shared
    races: Races | None
    parameters: dict[str, int]
    # With programmatic dependent launch: buffers that an earlier launch may still write, or read
    written_before: set[int]
    read_before: set[int]
    never_waited: tuple[set[int], set[int]]  # of them, those of launches that nobody has waited for
    poison: dict[int, dict[int, int]]  # buffer -> byte -> the only thread that reads it in time
    integer_bits: IntegerBits | None  # followed if a buffer has integers
    waited: bool  # whether this CTA has waited for the launches before

    def address(self, operand: Operand) -> Array:
        """Return the byte addresses of an operand in brackets; refuse one that depends on data."""
        if not isinstance(operand, Address):
            raise unknown(self.current, f"operand {operand} of")
        base = operand.base
        if self.tainted(base):
            raise refuse(
                DataAddressError,
                self.current,
                expected="an address that does not depend on float data",
                received=f"register {getattr(base, 'name', base)}, computed from float data",
                remedy="a gather by computed indices cannot be certified; pass the indices as an "
                "integer buffer",
            )
        width = base.width if isinstance(base, Register) else 64
        return self.bits(base, width).astype(np.int64) + operand.offset

    def buffer_at(self, space: str, addresses: Array, size: int) -> Buffer:
        """Return the buffer that all addresses are in; refuse one outside or not aligned."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        if space == "shared":
            found: Buffer = self.shared
        else:
            at = int(np.searchsorted(self.bases, low, side="right")) - 1
            found = self.buffers[max(at, 0)] if self.buffers else self.shared
            if 0 <= at < len(self.buffers) - 1 and low >= found.base + found.size:
                after = self.buffers[at + 1]
                found = after if after.base - low < low - found.base - found.size else found
        base = 0 if space == "shared" else found.base
        outside = low < base or high > base + found.size
        if outside or (not self.buffers and space != "shared"):
            far = low if low < base or low >= base + found.size else high - size
            thread = int(np.flatnonzero(addresses == far)[0])
            name = "shared memory" if space == "shared" else found.label or "the nearest buffer"
            raise refuse(
                AddressError,
                self.current,
                expected=f"an address inside {name} ({found.size} bytes)",
                received=f"{self.access()} of {size} bytes at byte {far - base}, active thread number {thread}",
                remedy="check sizes, strides and masks of the launch",
            )
        if size > 1 and (addresses % size).any():
            raise refuse(
                AddressError,
                self.current,
                expected=f"addresses aligned to {size} bytes",
                received=f"{int(addresses[(addresses % size) != 0][0]):#x}",
                remedy="check the alignment of buffers and tt.divisibility",
            )
        if space != "shared" and (self.written_before or self.read_before):
            self.check_dependence(found)
        return found

    def check_dependence(self, buffer: Buffer) -> None:
        """Refuse an access that races with a launch before, which may still be running."""
        writes = self.access() == "a write"
        written, read = self.written_before, self.read_before
        if self.waited:  # for the launch before, and so for those that it had waited for
            written, read = self.never_waited
        if id(buffer) in written or (writes and id(buffer) in read):
            did = "write" if id(buffer) in written else "read"
            raise refuse(
                RaceError,
                self.current,
                expected="griddepcontrol.wait before memory that the launch before uses (launch_pdl=True)",
                received=f"{buffer.label} is used by {self.access()} while the launch before may still {did} it",
                remedy="call gdc_wait() before it, or launch without launch_pdl",
            )

    def access(self) -> str:
        """Return what the current instruction does with memory."""
        writes = self.current.opcode.startswith(("st", "red", "cp.reduce"))
        return "a write" if writes else "a read"

    def load(
        self, space: str, addresses: Array, size: int, mask: Array | None
    ) -> tuple[Array, Names | None]:
        """Return halves [threads, size / 2] and their names; zeros in threads outside the mask.

        The names are None if no half depends on data. A size of 1 reads the half around the byte.
        """
        width = max(1, size // 2)
        active = np.arange(self.threads) if mask is None else np.flatnonzero(mask)
        data = np.zeros((self.threads, width), np.uint16)
        made: Names | None = None
        for part, buffer in self.by_buffer(space, addresses, active, size):
            at = addresses[part] - (0 if space == "shared" else buffer.base)
            data[part], found = memory.read(buffer, at, size)
            if self.integer_bits is not None and buffer.integers is not None:
                index = (at >> 1)[:, None] + np.arange(width)
                self.integer_bits.touched |= bool(buffer.integers[index].any())
            if self.races is not None:
                self.races.read(Access(self.current, buffer, at, size, part))
            if id(buffer) in self.poison:
                found = self.poisoned(buffer, at, width, part, data[part], found)
            if found is not None:
                found, empty = memory.known(found)
                if empty:
                    self.fact("reads shared memory that was never written")
                if made is None:
                    made = np.full((self.threads, width), nm.FIXED)
                made[part] = found
            if made is not None and found is None:
                made[part] = nm.fixed_half(data[part])
        return data, made

    def poisoned(
        self, buffer: Buffer, at: Array, width: int, part: Array, data: Array, found: Names | None
    ) -> Names:
        """Return names that equal no others for what a thread may read after another has written it."""
        writers = self.poison[id(buffer)]
        made = nm.fixed_half(data) if found is None else found.copy()
        for row, (start, thread) in enumerate(zip(at.tolist(), part.tolist(), strict=True)):
            for half in range(width):
                if writers.get((start + 2 * half) & ~1, thread) != thread:
                    made[row, half] = registers.unknown_names(1)[0]
        return made

    def store(
        self,
        space: str,
        addresses: Array,
        data: Array,
        made: Names | None,
        mask: Array | None,
    ) -> None:
        """Write halves [threads, n] and their names (None: constants) at byte addresses."""
        active = np.arange(self.threads) if mask is None else np.flatnonzero(mask)
        for part, buffer in self.by_buffer(space, addresses, active, 2 * data.shape[1]):
            at = addresses[part] - (0 if space == "shared" else buffer.base)
            self.put(buffer, at, data[part], None if made is None else made[part], part)

    def put(
        self,
        buffer: Buffer,
        at: Array,
        data: Array,
        made: Names | None,
        threads: Array,
        by_warp: bool = False,
    ) -> None:
        """Write halves [n, m] at byte offsets [n] of a buffer, for the threads [n]."""
        index = (at >> 1)[:, None] + np.arange(data.shape[1])
        self.mark(buffer, index)
        named = None
        if self.names and (made is not None or buffer.names is not None):
            named = nm.fixed_half(data) if made is None else made

        def unchanged() -> Array:
            same = buffer.halves[index] == data
            return np.asarray(same if named is None else same & (buffer.named()[index] == named))

        if self.races is not None:
            size = 2 * data.shape[1]
            self.races.write(Access(self.current, buffer, at, size, threads, by_warp), unchanged)
        if named is not None:
            buffer.named()[index] = named
        elif buffer.names is not None:  # bits only: what a run with names left is no longer true
            buffer.names[index] = registers.unknown_names(index.size).reshape(index.shape)
        buffer.halves[index] = data
        if self.races is not None and not unchanged().all():
            row = int(np.nonzero(~unchanged())[0][0])
            raise refuse(
                RaceError,
                self.current,
                expected="one value for each byte that an instruction writes",
                received=f"thread {int(threads[row])} and another write different values",
                remedy="give each thread its own address, or the same value",
            )

    def mark(self, buffer: Buffer, index: Array) -> None:
        """Note that the current instruction stores to a buffer, and whether it stores integers."""
        buffer.changed = True
        if self.integer_bits is not None:
            holds = self.integer_bits.storing or self.integer_bits.touched
            if buffer.integers is None and holds:
                buffer.integers = np.zeros(buffer.halves.size, bool)
            if buffer.integers is not None:
                buffer.integers[index] = holds

    def by_buffer(
        self, space: str, addresses: Array, active: Array, size: int
    ) -> list[tuple[Array, Buffer]]:
        """Group active threads by the buffer that they address."""
        if not active.size:
            return []
        if space != "shared" and len(self.buffers) > 1:
            which = np.searchsorted(self.bases, addresses[active], side="right")
            if (which != which[0]).any():
                parts = [active[which == each] for each in np.unique(which)]
                return [(p, self.buffer_at(space, addresses[p], size)) for p in parts]
        return [(active, self.buffer_at(space, addresses[active], size))]

    def store_byte(
        self,
        space: str,
        addresses: Array,
        bits: Array,
        name: Names | None,
        mask: Array | None,
    ) -> None:
        """Write one byte per thread; the half around it gets the name of its two bytes."""
        active = np.arange(self.threads) if mask is None else np.flatnonzero(mask)
        for part, buffer in self.by_buffer(space, addresses, active, 1):
            at = addresses[part] - (0 if space == "shared" else buffer.base)
            if self.races is not None:
                self.races.write(Access(self.current, buffer, at, 1, part))
            self.mark(buffer, at >> 1)
            named = buffer.named() if self.names else None
            buffer.bytes[at] = bits[part]
            if named is None or name is None:
                continue
            for odd in (0, 1):  # two threads may write the two bytes of one half
                mine = (at & 1) == odd
                half = (at >> 1)[mine]
                before, _ = memory.known(named[half])
                other, new = byte_of(before, 1 - odd), name[part][mine]
                named[half] = half_of_bytes(*((other, new) if odd else (new, other)))

    def load_rows(self, addresses: Array, mask: Array | None) -> tuple[Array, Names | None]:
        """Read rows of 16 bytes of shared memory for ldmatrix: addresses [warps, 8].

        Returns:
            Halves [warps, 8, 8] and their names; zeros for warps that do not execute.
        """
        warps, threads = self.rows_of_warps(addresses, mask)
        data = np.zeros((addresses.shape[0], 8, 8), np.uint16)
        if not warps.size:
            return data, None
        rows = addresses[warps].reshape(-1)
        buffer = self.buffer_at("shared", rows, 16)
        if self.races is not None:
            self.races.read(Access(self.current, buffer, rows, 16, threads, by_warp=True))
        found, made = memory.read(buffer, rows, 16)
        data[warps] = found.reshape(-1, 8, 8)
        if made is None:
            return data, None
        made, empty = memory.known(made)
        if empty:
            self.fact("reads shared memory that was never written")
        named = np.full(data.shape, nm.FIXED)
        named[warps] = made.reshape(-1, 8, 8)
        return data, named

    def store_rows(
        self, addresses: Array, data: Array, made: Names | None, mask: Array | None
    ) -> None:
        """Write rows of shared memory for stmatrix: addresses [warps, 8], halves [warps, 8, 8]."""
        warps, threads = self.rows_of_warps(addresses, mask)
        if warps.size:
            rows = addresses[warps].reshape(-1)
            buffer = self.buffer_at("shared", rows, 16)
            named = None if made is None else made[warps].reshape(-1, 8)
            self.put(buffer, rows, data[warps].reshape(-1, 8), named, threads, by_warp=True)

    def rows_of_warps(self, addresses: Array, mask: Array | None) -> tuple[Array, Array]:
        """Return the warps that execute, and for each of their rows the first thread of the warp."""
        warps = np.arange(addresses.shape[0])
        if mask is not None:
            warps = warps[mask.reshape(-1, 32).any(1)]
        return warps, np.repeat(32 * warps, 8)

    def store_async(
        self, addresses: Array, data: Array, made: Names | None, mask: Array | None
    ) -> None:
        """Write shared memory by cp.async: nobody may touch it before the wait and a barrier."""
        races, self.races = self.races, None
        self.store("shared", addresses, data, made, mask)
        self.races = races
        if races is not None:
            active = np.arange(self.threads) if mask is None else np.flatnonzero(mask)
            at = addresses[active]
            races.write_later(Access(self.current, self.shared, at, 2 * data.shape[1], active))
