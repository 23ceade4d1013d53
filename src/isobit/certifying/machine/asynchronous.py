"""Asynchronous work of a CTA, and what may not be touched until it has ended.

[Note: order of asynchronous work]
The machine performs asynchronous work (wgmma, tcgen05, bulk copies) at once, and remembers it as open until the
threads know that it has ended. What a GPU does not order is an error, whatever the bits:

* a register that open work will write (an accumulator of wgmma, a result of tcgen05.ld), read or written; a `mov`
  that copies a result of tcgen05.ld is no use of it, but its target is not ready either: Triton emits such pairs of
  registers before tcgen05.wait::ld, and ptxas makes no instruction of them;
* a register that open wgmma reads, written; and one that wgmma uses, used elsewhere after the last wgmma.fence;
* shared memory that open work may still read, written; shared memory that a bulk copy writes, touched;
* shared memory written by threads and read by wgmma or tcgen05.mma without `fence.proxy.async` and a barrier
  between (threads and tensor core reach memory by different paths, PTX ISA "Async proxy");
* tensor memory that open work uses, touched by other instructions.

Work ends for the threads that wait for it: wgmma by wait_group, tcgen05.mma and bulk copies by the barrier object
that they arrive at, tcgen05.ld and .st by tcgen05.wait. A `bar.sync` tells all other threads.
Shared memory is followed in pieces of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from isobit.certifying.machine.tensor_memory import Cells
from isobit.certifying.ptx import Address, Instruction, Operand, Pair, Program, Register, Vector
from isobit.certifying.running.refusals import RaceError, place, refuse

PIECE = 16
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
ASYNCHRONOUS = ("wgmma", "tcgen05", "mbarrier", "tensormap")


@dataclass
class Work:
    """One asynchronous instruction that was issued."""

    number: int
    instruction: Instruction
    pipe: str
    known: Mask  # Threads that know that it has ended.
    waited: bool = False  # Its own threads waited; the others know after the next bar.sync.
    outputs: frozenset[int] = frozenset()
    copies: frozenset[int] = frozenset()  # Outputs that a mov wrote.
    inputs: frozenset[int] = frozenset()
    reads: list[Cells] = field(default_factory=list)
    writes: list[Cells] = field(default_factory=list)
    box: tuple[Array, int] | None = None  # addresses and bytes of elements that a bulk copy writes


class Asynchronous:
    """The open work of one CTA."""

    def __init__(
        self, program: Program, use: RegisterUse, shared_bytes: int, checked: bool = True
    ) -> None:
        pieces = -(-shared_bytes // PIECE)
        self.checked = checked
        self.use = use
        self.everyone = np.ones(program.threads, bool)
        self.program = program
        self.open: dict[int, Work] = {}
        self.count = 0
        # By piece of shared memory: the last work that reads it, or a bulk copy that writes it (number + 1).
        self.reader = np.zeros(pieces, np.int64)
        self.writer = np.zeros(pieces, np.int64)
        # The last instruction (index + 1) that wrote a piece, until a proxy fence and until a barrier.
        self.unfenced = np.zeros(pieces, np.int64)
        self.unsynchronised = np.zeros(pieces, np.int64)
        self.copied = np.zeros(pieces, np.int64)  # by cp.async, until its group is waited for
        self.outputs: dict[int, Work] = {}  # registers that open work writes
        self.inputs: dict[int, Work] = {}  # registers that open work reads
        self.fenced = False  # whether there was a wgmma.fence
        self.touched: dict[int, Instruction] = {}  # registers used since the last one

    def start(
        self, instruction: Instruction, pipe: str, pieces: Array | None = None, **uses: Any
    ) -> Work:
        """Open work that reads these pieces of shared memory."""
        work = Work(self.count, instruction, pipe, np.zeros_like(self.everyone), **uses)
        self.count += 1
        self.open[work.number] = work
        if pieces is not None:
            self.reader[pieces] = work.number + 1
        self.outputs.update(dict.fromkeys(work.outputs, work))
        self.inputs.update(dict.fromkeys(work.inputs, work))
        return work

    def end(self, works: list[Work], threads: Mask | None) -> None:
        """Let work end for some threads; `None` is the threads that issued it."""
        for work in works:
            for registers, table in ((work.outputs, self.outputs), (work.inputs, self.inputs)):
                for register in registers:
                    if table.get(register) is work:
                        del table[register]
            if threads is None:
                work.waited = True
            else:
                work.known |= threads
                if work.known.all():
                    self.open.pop(work.number, None)

    def barrier(self) -> None:
        """Take a bar.sync of all threads: what one of them knows, all know."""
        self.unsynchronised[:] = 0
        for work in [each for each in self.open.values() if each.waited or each.known.any()]:
            del self.open[work.number]

    def finish(self) -> None:
        """Refuse a CTA that ends while bulk stores read its shared memory."""
        for work in self.open.values() if self.checked else ():
            if work.pipe == "bulk store" and not work.waited:
                raise self.race(work.instruction, work, "the end of the CTA")

    def fence_proxy(self, threads: Mask) -> None:
        """Take fence.proxy.async; one that only some threads execute orders nothing here."""
        if threads.all():
            self.unfenced[:] = 0

    # ---- registers --------------------------------------------------------------------------------
    def before(self, instruction: Instruction) -> None:
        """Check the registers of an instruction that is about to run."""
        if self.outputs:
            for register in self.use.all[instruction.index] & self.outputs.keys():
                work = self.outputs[register]
                if not (
                    self.chained(instruction, work, register) or self.copied_on(instruction, work)
                ):
                    raise self.race(instruction, work, "a register that is not ready")
        written = self.use.written[instruction.index]
        if self.inputs:
            for register in written:
                if register in self.inputs:
                    raise self.race(instruction, self.inputs[register], "a register that is in use")
        if instruction.parts[0] == "wgmma":
            return
        # Copies and constants are no computation: ptxas places them, and Triton emits them after the fence.
        read = self.use.read[instruction.index]
        copies = instruction.parts[0] == "mov" and self.touched.keys().isdisjoint(read)
        for register in written if copies else ():
            self.touched.pop(register, None)
        if not copies:
            self.touched.update(dict.fromkeys(self.use.all[instruction.index], instruction))

    def copied_on(self, instruction: Instruction, work: Work) -> bool:
        """Whether this only copies results of tcgen05.ld; then the copy, too, is not ready until the work ends."""
        index = instruction.index
        written = self.use.written[index]
        if (
            instruction.parts[0] != "mov"
            or instruction.guard is not None
            or work.pipe != "tcgen05.ld"
            or any(self.outputs.get(each, work) is not work for each in self.use.all[index])
            or not written.isdisjoint(work.outputs - work.copies)
        ):
            return False
        work.outputs, work.copies = work.outputs | written, work.copies | written
        self.outputs.update(dict.fromkeys(written, work))
        return True

    def chained(self, instruction: Instruction, work: Work, register: int) -> bool:
        """Whether this is the next wgmma on the same accumulator, which the hardware orders."""
        if not instruction.opcode.startswith("wgmma.mma_async"):
            return False
        # The accumulator as a whole: the same registers, used in no other operand.
        same = work.instruction.operands[0] == instruction.operands[0]
        return (
            same
            and work.instruction.opcode == instruction.opcode
            and register not in self.use.read[instruction.index]
        )

    def check_fenced(self, instruction: Instruction, registers: frozenset[int]) -> None:
        """Refuse registers of a wgmma that other instructions used after the last wgmma.fence."""
        used = registers & self.touched.keys()
        if self.checked and (used or not self.fenced):
            where = (
                f"a register used at {place(self.touched[min(used)])}" if used else "none at all"
            )
            raise refuse(
                RaceError,
                instruction,
                expected="wgmma.fence between using a register and wgmma.mma_async",
                received=where,
                remedy="put the fence back; Triton emits one before the first wgmma of a dot",
            )

    # ---- shared memory ----------------------------------------------------------------------------
    def pieces(self, addresses: Array, size: int) -> Array:
        """Return the pieces of shared memory that accesses of `size` bytes touch."""
        first = addresses // PIECE
        if size <= PIECE and not (addresses % size).any():
            return first
        last = (addresses + size - 1) // PIECE
        return first[..., None] + np.arange(int((last - first).max(initial=0)) + 1)

    def touch(self, instruction: Instruction, pieces: Array, threads: Mask, write: bool) -> None:
        """Check an access of threads to shared memory against open work."""
        if not self.open or not self.checked:
            return
        for table in (self.reader, self.writer) if write else (self.writer,):
            for number in np.unique(table[pieces]):
                work = self.open.get(int(number) - 1)
                if work is not None and (threads & ~work.known).any():
                    what = (
                        "shared memory that it may still read"
                        if table is self.reader
                        else "its result"
                    )
                    raise self.race(instruction, work, what)

    def store(self, instruction: Instruction, pieces: Array, threads: Mask) -> None:
        """Take a write of threads to shared memory."""
        self.touch(instruction, pieces, threads, write=True)
        self.written_by_threads(instruction, pieces)

    def written_by_threads(self, instruction: Instruction, pieces: Array) -> None:
        """Note that the tensor core does not see these pieces before a fence and a barrier."""
        self.unsynchronised[pieces] = instruction.index + 1
        # tcgen05.alloc is no store of a thread: Triton lets a bulk copy reuse its four bytes without a fence.
        if not instruction.opcode.startswith("tcgen05.alloc"):
            self.unfenced[pieces] = instruction.index + 1

    def check_visible(self, instruction: Instruction, pieces: Array, threads: Mask) -> None:
        """Refuse a read by the tensor core of what threads wrote without a fence and a barrier."""
        self.touch(instruction, pieces, threads, write=False)
        if not self.checked:
            return
        for table, missing in (
            (self.copied, "cp.async.wait_group"),
            (self.unsynchronised, "bar.sync"),
            (self.unfenced, "fence.proxy.async"),
        ):
            if table[pieces].any():
                writer = self.program.instructions[int(table[pieces].max()) - 1]
                raise refuse(
                    RaceError,
                    instruction,
                    expected=f"{missing} between a write to shared memory and the tensor core's read",
                    received=f"shared memory written at {place(writer)}",
                    remedy="put it back; Triton emits fence.proxy.async and a barrier before the tensor core",
                )

    # ---- tensor memory ----------------------------------------------------------------------------
    def touch_cells(
        self, instruction: Instruction, cells: list[Cells], threads: Mask, write: bool, own: bool
    ) -> None:
        """Check an access to tensor memory.

        Args:
            instruction: the one that accesses.
            cells: what it accesses.
            threads: the threads that execute it.
            write: whether it writes.
            own: whether it is a load or store of a warp, which needs no barrier after those of the same
                warp; otherwise an mma, which mma of the same thread never overtake.
        """
        for work in self.open.values() if self.checked else ():
            of_mma = work.pipe == "tcgen05.mma"
            if (of_mma and not own) or not (threads & ~work.known).any():
                continue
            for mine in cells:
                for other in work.writes + (work.reads if write else []):
                    ordered = own and work.waited and mine.warp == other.warp
                    if mine.overlaps(other) and not ordered:
                        raise self.race(instruction, work, "tensor memory that it uses")

    def race(self, instruction: Instruction, work: Work, what: str) -> Exception:
        """Return the error for an access that open work forbids."""
        return refuse(
            RaceError,
            instruction,
            expected="asynchronous work to be waited for before what it uses is touched",
            received=f"{what}: {work.pipe} of {place(work.instruction)} has not ended",
            remedy="wait for it first: wgmma.wait_group, tcgen05.wait or the mbarrier that it arrives at",
        )


def uses_asynchronous_work(program: Program) -> bool:
    """Whether a program has instructions whose order must be checked."""
    return any(
        each.parts[0] in ASYNCHRONOUS or each.opcode.startswith("cp.async.bulk")
        for each in program.instructions
    )


def registers_of(operands: tuple[Operand, ...]) -> frozenset[int]:
    """Return the numbers of all registers in operands, those of addresses too."""
    found: set[int] = set()
    for operand in operands:
        if isinstance(operand, Register):
            found.add(operand.index)
        elif isinstance(operand, Vector):
            found |= registers_of(operand.items)
        elif isinstance(operand, Pair):
            found |= registers_of((operand.first, operand.second))
        elif isinstance(operand, Address):
            found |= registers_of((operand.base,))
    return frozenset(found)


class RegisterUse:
    """By instruction: all its registers, and those of its first operand (written) and the others."""

    def __init__(self, program: Program) -> None:
        self.all = [registers_of(each.operands) for each in program.instructions]
        self.read = [registers_of(each.operands[1:]) for each in program.instructions]
        self.written = [
            frozenset()
            if not each.operands or isinstance(each.operands[0], Address)
            else registers_of(each.operands[:1])
            for each in program.instructions
        ]
