"""How opcodes read and write registers and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from isobit.compiled import arithmetic as ar
from isobit.compiled import names as nm
from isobit.compiled.machine import memory, registers
from isobit.compiled.machine.memory import Buffer
from isobit.compiled.machine.naming import Naming
from isobit.compiled.machine.registers import UNSIGNED, Word
from isobit.compiled.names import Array, Names
from isobit.compiled.ptx.program import (
    Address,
    Immediate,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
)
from isobit.compiled.refusals import (
    AddressError,
    DataAddressError,
    DivergentBranchError,
    RaceError,
    refuse,
    unknown,
)

if TYPE_CHECKING:
    from isobit.compiled.machine.machine import Machine


class Access:
    """The part of the machine that opcodes use."""

    # ---- registers ------------------------------------------------------------------------------
    def bits(self: Machine, operand: Operand, width: int) -> Array:  # type: ignore[misc]
        """Return the bits of an operand for all threads, as unsigned integers of this width."""
        kind = UNSIGNED[width]
        if isinstance(operand, Register):
            values = self.values[operand.index]
            if values is None:
                values = self.never_written(operand)
            if operand.width != width:
                if (operand.width == 1) != (width == 1) or operand.width < width:
                    raise unknown(self.current, f"register {operand.name} too narrow for")
                return values.astype(kind)
            return values
        if isinstance(operand, Immediate):
            if width == 1:
                return np.full(self.threads, bool(operand.value))
            if operand.kind != "int" and int(operand.kind[1:]) != width:
                raise unknown(self.current, f"a constant of type {operand.kind} in")
            return np.full(self.threads, operand.value & ((1 << width) - 1), kind)
        if isinstance(operand, Special):
            return self.special_register(operand.name).astype(kind)
        if isinstance(operand, Symbol) and operand.name in self.symbols:
            return np.full(self.threads, self.symbols[operand.name], kind)
        raise unknown(self.current, f"operand {operand} of")

    def never_written(self: Machine, register: Register) -> Array:  # type: ignore[misc]
        """Return zeros, with names that equal no others, for a register that nothing has written."""
        values = np.zeros(self.threads, UNSIGNED[register.width])
        self.values[register.index] = values
        if self.names:
            made = registers.unknown_register(register.width, self.threads)
            self.named[register.index] = made
        self.fact("reads a register that was never written")
        return values

    def tainted(self: Machine, operand: Operand) -> bool:  # type: ignore[misc]
        """Tell whether an operand depends on float data in some thread."""
        if not isinstance(operand, Register):
            return False
        if self.values[operand.index] is None:
            self.never_written(operand)
        return self.named[operand.index] is not None

    def names_of(self: Machine, operand: Operand, width: int) -> Any:  # type: ignore[misc]
        """Return names in the form of a register of this width; constants if it is concrete."""
        if self.tainted(operand):
            assert isinstance(operand, Register)
            if operand.width != width:
                raise unknown(self.current, f"width of register {operand.name} in")
            return self.named[operand.index]
        return registers.constant_names(self.bits(operand, width), width)

    def word(self: Machine, operand: Operand) -> Names:  # type: ignore[misc]
        """Return the names of 32-bit values, one per thread."""
        made: Word = self.names_of(operand, 32)
        return made.value

    def halves(self: Machine, operand: Operand) -> tuple[Names, Names]:  # type: ignore[misc]
        """Return the lower and upper halves of a 32-bit operand."""
        made: Word = self.names_of(operand, 32)
        return made.halves

    def half(self: Machine, operand: Operand) -> Names:  # type: ignore[misc]
        """Return the halves of a 16-bit operand."""
        made: Names = self.names_of(operand, 16)
        return made

    def write(  # type: ignore[misc]
        self: Machine, target: Operand, bits: Array, mask: Array | None, made: Any = None
    ) -> None:
        """Write a register in the threads of the mask.

        Args:
            target: a register, or `_`.
            bits: one value per thread, of the register's width.
            mask: the threads that execute; all if None.
            made: names in the form of the register's width; None if no thread depends on data.
        """
        if isinstance(target, Sink):
            return
        if not isinstance(target, Register):
            raise unknown(self.current, f"target {target} of")
        index, width = target.index, target.width
        kind = UNSIGNED[width]
        if bits.dtype != kind:
            bits = bits.astype(kind)
        if bits.shape != (self.threads,):
            bits = np.broadcast_to(bits, (self.threads,))
        if mask is None:
            self.values[index] = bits
            self.named[index] = made if self.names else None
            return
        old = self.values[index]
        if old is None:
            old = np.zeros(self.threads, kind)
            if self.names:
                self.named[index] = registers.unknown_register(width, self.threads)
        if self.names and (made is not None or self.named[index] is not None):
            new = registers.constant_names(bits, width) if made is None else made
            before = self.named[index]
            if before is None:
                before = registers.constant_names(old, width)
            self.named[index] = registers.normal(
                width, registers.merge(width, mask, self.guard_names, new, before)
            )
        elif self.guard_names is not None:
            new, before = (registers.constant_names(each, width) for each in (bits, old))
            self.named[index] = registers.merge(width, mask, self.guard_names, new, before)
        self.values[index] = np.where(mask, bits, old)

    # ---- names ----------------------------------------------------------------------------------
    def make(  # type: ignore[misc]
        self: Machine, name: Naming, operands: Sequence[Names], bits: Array | None
    ) -> Names:
        """Return the names of results, and record the operation if the machine records."""
        made = name(operands, bits)
        if self.recorded is not None:
            self.recorded.add(name.operation, made, operands, self.current)
        return made

    def opaque(  # type: ignore[misc]
        self: Machine, name: Naming, sources: Sequence[tuple[Operand, int]], bits: Array, width: int
    ) -> Any:
        """Return the names of an operation that is known by its operands only.

        Args:
            name: the operation.
            sources: operands with the width that each is read with.
            bits: the results, which name the threads whose operands are constants.
            width: of the result: 1, 16, 32 or 64.

        Returns:
            Names in the form of a register, or None if no operand depends on data.
        """
        if not self.names or (name.folds and not any(self.tainted(each) for each, _ in sources)):
            return None
        operands = [self.one_name(each, wide) for each, wide in sources]
        made = self.make(name, operands, None)
        if name.folds:
            known = np.logical_and.reduce([nm.is_constant(each) for each in operands])
        else:
            known = np.zeros(self.threads, bool)
        return registers.normal(width, registers.from_names(width, made, known, bits))

    def one_name(self: Machine, operand: Operand, width: int) -> Names:  # type: ignore[misc]
        """Return one name per thread for an operand of any width; constants keep their flag."""
        if width == 8:
            made = self.names_of(operand, getattr(operand, "width", 16))
            return nm.byte_of(made.halves[0] if isinstance(made, Word) else made, 0)
        made = self.names_of(operand, width)
        if width == 1:
            return np.asarray(made)
        if width == 16:
            return nm.value16(made)
        return made.value if width == 32 else registers.name64(made)

    def widened(self: Machine, operand: Operand, kind: str) -> Names:  # type: ignore[misc]
        """Return the names of the fp32 values of a 16-bit operand."""
        half = self.half(operand)
        exact = nm.constant(ar.widen(self.bits(operand, 16), kind).view(np.uint32))
        made = nm.widen(kind, nm.value16(half))
        if self.recorded is not None:
            self.recorded.add(f"widen {kind}", made, [nm.value16(half)], self.current)
        return np.where(nm.half_is_fixed(half), exact, made)

    # ---- memory ---------------------------------------------------------------------------------
    def address(self: Machine, operand: Operand) -> Array:  # type: ignore[misc]
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

    def buffer_at(self: Machine, space: str, addresses: Array, size: int) -> Buffer:  # type: ignore[misc]
        """Return the buffer that all addresses are in; refuse one outside or not aligned."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        if space == "shared":
            found: Buffer = self.shared
        else:
            at = int(np.searchsorted(self.bases, low, side="right")) - 1
            found = self.buffers[max(at, 0)] if self.buffers else self.shared
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
                received=f"byte {far - base} ({size} bytes), active thread number {thread}",
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
        return found

    def load(  # type: ignore[misc]
        self: Machine, space: str, addresses: Array, size: int, mask: Array | None
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
            if self.races is not None:
                self.races.read(self.current, buffer, at, size, part)
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

    def store(  # type: ignore[misc]
        self: Machine,
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

    def put(  # type: ignore[misc]
        self: Machine,
        buffer: Buffer,
        at: Array,
        data: Array,
        made: Names | None,
        threads: Array,
        by_warp: bool = False,
    ) -> None:
        """Write halves [n, m] at byte offsets [n] of a buffer, for the threads [n]."""
        index = (at >> 1)[:, None] + np.arange(data.shape[1])
        named = None
        if self.names and (made is not None or buffer.names is not None):
            named = nm.fixed_half(data) if made is None else made

        def unchanged() -> Array:
            same = buffer.halves[index] == data
            return same if named is None else same & (buffer.named()[index] == named)

        if self.races is not None:
            size = 2 * data.shape[1]
            self.races.write(self.current, buffer, at, size, threads, unchanged, by_warp)
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

    def by_buffer(  # type: ignore[misc]
        self: Machine, space: str, addresses: Array, active: Array, size: int
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

    def store_byte(  # type: ignore[misc]
        self: Machine,
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
                self.races.write(self.current, buffer, at, 1, part)
            named = buffer.named() if self.names else None
            buffer.bytes[at] = bits[part]
            if named is None or name is None:
                continue
            for odd in (0, 1):  # two threads may write the two bytes of one half
                mine = (at & 1) == odd
                half = (at >> 1)[mine]
                before, _ = memory.known(named[half])
                other, new = nm.byte_of(before, 1 - odd), name[part][mine]
                named[half] = nm.half_of_bytes(*((other, new) if odd else (new, other)))

    def load_rows(  # type: ignore[misc]
        self: Machine, addresses: Array, mask: Array | None
    ) -> tuple[Array, Names | None]:
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
            self.races.read(self.current, buffer, rows, 16, threads, by_warp=True)
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

    def store_rows(  # type: ignore[misc]
        self: Machine, addresses: Array, data: Array, made: Names | None, mask: Array | None
    ) -> None:
        """Write rows of shared memory for stmatrix: addresses [warps, 8], halves [warps, 8, 8]."""
        warps, threads = self.rows_of_warps(addresses, mask)
        if warps.size:
            rows = addresses[warps].reshape(-1)
            buffer = self.buffer_at("shared", rows, 16)
            named = None if made is None else made[warps].reshape(-1, 8)
            self.put(buffer, rows, data[warps].reshape(-1, 8), named, threads, by_warp=True)

    def rows_of_warps(  # type: ignore[misc]
        self: Machine, addresses: Array, mask: Array | None
    ) -> tuple[Array, Array]:
        """Return the warps that execute, and for each of their rows the first thread of the warp."""
        warps = np.arange(addresses.shape[0])
        if mask is not None:
            warps = warps[mask.reshape(-1, 32).any(1)]
        return warps, np.repeat(32 * warps, 8)

    def store_async(  # type: ignore[misc]
        self: Machine, addresses: Array, data: Array, made: Names | None, mask: Array | None
    ) -> None:
        """Write shared memory by cp.async: nobody may touch it before the wait and a barrier."""
        races, self.races = self.races, None
        self.store("shared", addresses, data, made, mask)
        self.races = races
        if races is not None:
            active = np.arange(self.threads) if mask is None else np.flatnonzero(mask)
            at = addresses[active]
            races.write_later(self.current, self.shared, at, 2 * data.shape[1], active)

    # ---- what opcodes require -------------------------------------------------------------------
    def concrete(self: Machine, operand: Operand) -> Array:  # type: ignore[misc]
        """Return a 32-bit operand that must not depend on float data."""
        if self.tainted(operand):
            raise refuse(
                DataAddressError,
                self.current,
                expected="a size, lane or count that does not depend on float data",
                received=f"operand {getattr(operand, 'name', operand)}",
                remedy="compute it from integers",
            )
        return self.bits(operand, 32)

    def everyone(self: Machine, mask: Array | None) -> None:  # type: ignore[misc]
        """Refuse an instruction of the whole CTA that some threads do not execute."""
        if mask is not None and not mask.all():
            raise refuse(
                DivergentBranchError,
                self.current,
                expected="all threads of the CTA",
                received=f"{int(mask.sum())} of {self.threads} threads",
                remedy="move the barrier out of the branch",
            )

    def whole_warps(self: Machine, mask: Array | None) -> None:  # type: ignore[misc]
        """Refuse an instruction of a warp that some of its threads do not execute."""
        if (
            mask is not None
            and not (mask.reshape(-1, 32).any(1) == mask.reshape(-1, 32).all(1)).all()
        ):
            raise refuse(
                DivergentBranchError,
                self.current,
                expected="all threads of a warp",
                received="some of them",
                remedy="move the instruction out of the branch",
            )

    def full_warp(self: Machine, operand: Operand) -> None:  # type: ignore[misc]
        """Refuse a mask of members that leaves threads out."""
        if (self.concrete(operand) != np.uint32(0xFFFFFFFF)).any():
            raise unknown(self.current, "member mask of")
