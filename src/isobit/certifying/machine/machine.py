"""Runs a PTX kernel: the threads of a CTA in lockstep, numpy over threads, CTAs one after another.

[Note: the machine]
Every register holds its bits, and beside them the name of the expression that made it (names.py).
Integers that do not depend on float data are concrete: they have bits and no name. A value that
depends on float data has a name, whatever instruction made it, so that addresses and branches
cannot depend on data unseen: both are refused. A warp may take a branch that another warp does not
take (code for one warp, as tensor-core kernels have it); a branch inside a warp is refused.

With names=False only bits are computed, and nothing that needs names is checked.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from isobit.certifying.machine import (  # noqa: F401 (they fill the table)
    barrier_objects,
    bulk_copies,
    mma,
    opcodes,
    tcgen05,
    wgmma,
)
from isobit.certifying.machine.asynchronous import (
    Asynchronous,
    RegisterUse,
    uses_asynchronous_work,
)
from isobit.certifying.machine.bulk_copies import TensorArgument, TensorMap
from isobit.certifying.machine.control import meeting_points, run_threads
from isobit.certifying.machine.memory import Buffer, Pointer, Shared
from isobit.certifying.machine.opcodes.table import find
from isobit.certifying.machine.packed import following
from isobit.certifying.machine.races import AsynchronousRaces, Races
from isobit.certifying.machine.registers import IntegerBits
from isobit.certifying.machine.state import State
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx.program import Instruction, Program
from isobit.certifying.running.recorded import Recorded
from isobit.errors import ArgumentError

SHARED_BYTES = 232448  # the most that a CTA can have, on sm_90 and sm_100 (227 KB)
FIRST_ADDRESS, GAP = 1 << 32, 1 << 24
PARAMETERS = 1 << 31  # where tensor maps of the host are


class Machine(State):
    """Runs one kernel on buffers.

    Args:
        program: from `isobit.certifying.ptx.parse`.
        engine: the arithmetic of the tensor cores, such as "tc25x16".
        names: whether values carry names.
        races: whether accesses of memory are checked for races.
        record: whether every operation is kept, so that expressions can be drawn.
    """

    def __init__(
        self,
        program: Program,
        engine: str = "tc25x16",
        names: bool = True,
        races: bool = True,
        record: bool = False,
    ) -> None:
        self.program, self.engine, self.names = program, engine, names
        self.threads = program.threads
        if self.threads % 32:
            raise ArgumentError(
                expected="a kernel with whole warps of 32 threads",
                received=f"{self.threads} threads",
                remedy="compile with num_warps",
            )
        self.recorded = Recorded(program) if record else None
        # registers of each instruction, if some work of the program is asynchronous
        self.use = RegisterUse(program) if uses_asynchronous_work(program) else None
        kind = Races if self.use is None else AsynchronousRaces
        self.races = kind(program) if races else None
        self.asynchronous: Asynchronous | None = None
        self.facts: dict[str, str] = {}  # what a reader of the result must know -> first place
        self.approximate: set[str] = set()  # opcodes whose bits are not those of the hardware
        self.hits = [0] * len(program.instructions)
        self.buffers: list[Buffer] = []
        self.state: dict[str, Any] = {}  # of opcodes that keep state within a CTA
        self.current: Instruction = program.instructions[0]
        self.guard_names: Names | None = None
        self.poison: dict[int, dict[int, int]] = {}
        self.integer_bits: IntegerBits | None = None
        self.written_before: set[int] = set()
        self.read_before: set[int] = set()
        self.never_waited: tuple[set[int], set[int]] = (set(), set())
        self.waited, self.always_waited = False, True
        self.active: Array | None = None  # the threads that run, while warps run apart
        self.meeting_points = meeting_points(program)
        self.steps = [following(each, find(each)[0](each)) for each in program.instructions]
        self.register_only = [find(each)[1] for each in program.instructions]

    @property
    def counts(self) -> dict[str, int]:
        """How often each opcode was executed, over all CTAs."""
        total: Counter[str] = Counter()
        for instruction, hits in zip(self.program.instructions, self.hits, strict=True):
            if hits:
                total[instruction.opcode] += hits
        return dict(total)

    @property
    def executed(self) -> int:
        """Instructions executed, each counted once for all threads of a CTA."""
        return sum(self.hits)

    # ---- launching ------------------------------------------------------------------------------
    def run(
        self,
        grid: Sequence[int],
        arguments: Sequence[Buffer | Pointer | TensorArgument | int | float],
        shared_bytes: int | None = None,
    ) -> Machine:
        """Run the kernel; may be called again with the same buffers.

        Args:
            grid: CTAs along x, y and z.
            arguments: buffers and numbers, in the order of the kernel's parameters.
            shared_bytes: dynamic shared memory; the most that a CTA can have if not given.

        Raises:
            ArgumentError: If no GPU gives a CTA that much shared memory.
        """
        x, y, z = (*grid, 1, 1)[:3]
        if shared_bytes is not None and not 0 <= shared_bytes <= SHARED_BYTES:
            raise ArgumentError(
                expected=f"at most {SHARED_BYTES} bytes of dynamic shared memory",
                received=f"shared_bytes={shared_bytes}",
                remedy="pass what the compiled kernel asks for: its metadata has it as `shared`",
            )
        self.place_arguments(arguments)
        size = (SHARED_BYTES if shared_bytes is None else shared_bytes) + self.program.shared_bytes
        if self.races is not None:
            self.races.start_launch()
        if self.names and any(buffer.integers is not None for buffer in self.buffers):
            self.integer_bits = IntegerBits(self.program)
        for cta in np.ndindex(z, y, x):
            self.start_cta(tuple(reversed(cta)), (x, y, z), size)
            self.waited = False
            run_threads(self)
            self.always_waited &= self.waited
            for each in (self.asynchronous, self.state.get("tensor memory")):
                if each is not None:
                    each.finish()
        for buffer in self.buffers:
            buffer.finish()
        return self

    def place_arguments(
        self, arguments: Sequence[Buffer | Pointer | TensorArgument | int | float]
    ) -> None:
        """Give buffers their addresses and parameters their values."""
        parameters = self.program.parameters
        if len(arguments) > len(parameters):
            raise ArgumentError(
                expected=f"at most {len(parameters)} arguments",
                received=f"{len(arguments)}",
                remedy="leave out arguments that are tl.constexpr",
            )
        self.parameters = {each.name: 0 for each in parameters}
        self.buffers, at = [], FIRST_ADDRESS
        self.symbols: dict[str, int] = {}
        self.host_maps: dict[tuple[str, int], TensorMap] = {}
        for parameter, argument in zip(parameters, arguments, strict=False):
            if isinstance(argument, TensorArgument) != bool(parameter.size):
                raise ArgumentError(
                    expected="a TensorArgument for each tensor descriptor, and for nothing else",
                    received=f"{type(argument).__name__} for {parameter.name}",
                    remedy="pass TensorArgument(...).arguments() for a descriptor of the host",
                )
            if isinstance(argument, (Buffer, Pointer, TensorArgument)):
                buffer = argument if isinstance(argument, Buffer) else argument.buffer
                if self.names:
                    buffer.prepare(parameter.name)
                if buffer not in self.buffers:
                    at = self.place(buffer, at)
                    self.check_overlap(buffer)
                offset = argument.offset if isinstance(argument, Pointer) else 0
                self.parameters[parameter.name] = buffer.base + offset
                if isinstance(argument, TensorArgument):
                    # the kernel takes the address of the parameter: one below all buffers
                    self.symbols[parameter.name] = PARAMETERS + 128 * len(self.host_maps)
                    self.host_maps["global", self.symbols[parameter.name]] = argument.tensor_map()
            else:
                self.parameters[parameter.name] = scalar_bits(argument, parameter.type)
        shared = 0
        for variable in self.program.variables.values():
            if variable.space == "shared":
                shared += -shared % max(variable.align, 1)
                self.symbols[variable.name] = shared
                shared += variable.size
            else:
                data = np.frombuffer(variable.data or b"", np.uint8).copy()
                constants = Buffer(data, label=variable.name, concrete=True)
                at = self.place(constants, at)
                self.symbols[variable.name] = constants.base
        self.bases = np.array([each.base for each in self.buffers] or [1 << 62], np.int64)

    def place(self, buffer: Buffer, at: int) -> int:
        """Give a buffer its address; return the next free one."""
        buffer.base = at
        self.buffers.append(buffer)
        if self.recorded is not None:
            self.recorded.add_buffer(buffer)
        return at + (buffer.size + 4095) // 4096 * 4096 + GAP

    def check_overlap(self, buffer: Buffer) -> None:
        """Refuse two buffers over one array: names of one would not follow writes to the other."""
        for other in self.buffers:
            if other is not buffer and np.may_share_memory(other.data, buffer.data):
                raise ArgumentError(
                    expected="one Buffer for each piece of memory",
                    received=f"{buffer.label} and {other.label}, which overlap",
                    remedy="pass the same Buffer twice, or a Pointer into it",
                )

    def start_cta(
        self, cta: tuple[int, ...], grid: tuple[int, int, int], shared_bytes: int
    ) -> None:
        """Clear registers, shared memory and what opcodes keep."""
        threads, thread = self.threads, np.arange(self.threads, dtype=np.uint32)
        self.values: list[Array | None] = [None] * len(self.program.registers)
        self.named: list[Any] = [None] * len(self.program.registers)
        self.shared = Shared(shared_bytes, self.names)
        self.state = {"tensor maps": dict(self.host_maps)} if self.host_maps else {}
        numbers = {
            **{f"%ctaid.{axis}": cta[i] for i, axis in enumerate("xyz")},
            **{f"%nctaid.{axis}": grid[i] for i, axis in enumerate("xyz")},
            **{f"%clusterid.{axis}": cta[i] for i, axis in enumerate("xyz")},
            **{f"%nclusterid.{axis}": grid[i] for i, axis in enumerate("xyz")},
            **{f"%cluster_ctaid.{axis}": 0 for axis in "xyz"},
            **{f"%cluster_nctaid.{axis}": 1 for axis in "xyz"},
            "%tid.y": 0,
            "%tid.z": 0,
            "%ntid.x": threads,
            "%ntid.y": 1,
            "%ntid.z": 1,
            "%cluster_ctarank": 0,
            "%cluster_nctarank": 1,
            "%nwarpid": threads // 32,
        }
        self.special: dict[str, Array] = {
            name: np.full(threads, value, np.uint32) for name, value in numbers.items()
        }
        self.special |= {"%tid.x": thread, "%laneid": thread % 32, "%warpid": thread // 32}
        if self.races is not None:
            self.races.start_cta(self.shared)
        if self.use is not None:
            checked = isinstance(self.races, AsynchronousRaces)
            self.asynchronous = Asynchronous(self.program, self.use, shared_bytes, checked)
            if isinstance(self.races, AsynchronousRaces):
                self.races.start(self.asynchronous)


def scalar_bits(value: float, kind: str) -> int:
    """Return the bits of a number that is passed as a parameter of this type."""
    if isinstance(value, float) or kind in ("f32", "f64"):
        wide = kind.endswith("64")
        return int.from_bytes(struct.pack("<d" if wide else "<f", value), "little")
    return int(value) & ((1 << 64) - 1)
