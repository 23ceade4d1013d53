"""What the machine does not run, each with the PTX line and the Python line that caused it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobit.certifying.judging.paths import short_path
from isobit.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from isobit.certifying.ptx.program import Instruction


class PtxSyntaxError(ArgumentError):
    """PTX text that the parser does not know."""


class MachineError(UnsupportedError):
    """Compiled code that the machine does not run; `ptx_line` and `source` say where."""

    ptx_line: int = 0
    source: tuple[str, int] | None = None


class OpcodeError(MachineError):
    """An opcode, a modifier, a type or a shape that the machine does not know."""


class DataBranchError(MachineError):
    """A branch, or a guard of a memory access, that depends on float data."""


class DataAddressError(MachineError):
    """An address that depends on float data."""


class DivergentBranchError(MachineError):
    """A branch that the threads of one warp do not take alike."""


class EndlessLoopError(MachineError):
    """A program that does not end, such as one that waits for a flag of another program."""


class AddressError(MachineError):
    """An address outside every buffer, outside shared memory, or not aligned."""


class FloatAtomicError(MachineError):
    """An atomic addition of floats: its order is not defined."""


class RaceError(MachineError):
    """Two accesses of the same bytes, one of them a write, that no barrier orders.

    `ptx_line` and `source` are of the later access, `other_line` and `other_source` of the earlier.
    """

    other_line: int = 0
    other_source: tuple[str, int] | None = None


class BarrierWaitError(MachineError):
    """A barrier object that is used in a way that no GPU orders, or a wait that never ends."""


def place(instruction: Instruction) -> str:
    """Return where an instruction is: the PTX line and, if known, the Python line."""
    shown = instruction.text if len(instruction.text) <= 100 else instruction.text[:97] + "..."
    text = f"PTX line {instruction.line}: {shown}"
    if instruction.source is not None:
        text += f" ({short_path(instruction.source[0])}:{instruction.source[1]})"
    return text


def refuse(
    kind: type[MachineError], instruction: Instruction, *, expected: str, received: str, remedy: str
) -> MachineError:
    """Return an error of `kind` that names the instruction; the caller raises it."""
    error = kind(expected=expected, received=f"{received}, at {place(instruction)}", remedy=remedy)
    error.ptx_line, error.source = instruction.line, instruction.source
    return error


def unknown(instruction: Instruction, what: str = "opcode") -> MachineError:
    """Return the error for an opcode, modifier, type or shape that is not known."""
    return refuse(
        OpcodeError,
        instruction,
        expected="an instruction that the machine knows",
        received=f"{what} {instruction.opcode}",
        remedy="write the kernel without it, or add the opcode to isobit.certifying.machine.opcodes",
    )
