"""Finds races: accesses of the same bytes, one of them a write, that no barrier orders.

[Note: races]
Lockstep execution gives every program one result, also one that is wrong on a GPU because a barrier
is missing. So each access is compared with earlier ones of the same bytes since the last barrier (an
epoch): two threads of which one writes is a race. Inside a warp, `bar.warp.sync` is a barrier too;
program order alone orders only the accesses of one thread. The bytes that cp.async writes are
pending until its thread has waited for the group; touching them before is a race, even by the same
thread. Between CTAs of one launch nothing is ordered: a byte that one writes may not be touched by
another. A write of the bits and names that are there already is no race inside a CTA (threads that
hold copies of a value store it several times).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isobit.certifying.machine.asynchronous import Asynchronous
from isobit.certifying.machine.mbarriers import Mbarriers
from isobit.certifying.machine.memory import Buffer, Shared
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Instruction
from isobit.certifying.running.refusals import RaceError, place, refuse

if TYPE_CHECKING:
    from isobit.certifying.ptx.program import Program


MANY = -2  # several threads, or several warps
NOBODY = -1
WHOLE_WARP = (
    -3
)  # the reader of ldmatrix: no single thread. Warp w as the writer of stmatrix is -3 - w.


@dataclass(frozen=True)
class Access:
    """What threads do in one instruction: they read or write `size` bytes at offsets `at` of a buffer."""

    instruction: Instruction
    buffer: Buffer
    at: Array
    size: int
    threads: Array
    by_warp: bool = False  # a warp as one


class Log:
    """The last accesses of each granule (two bytes; one if bytes are stored) of a buffer."""

    def __init__(self, size: int) -> None:
        self.granule, count = 2, (size + 1) // 2
        self.arrays = {name: np.full(count, NOBODY, np.int32) for name in FIELDS}
        self.pending = np.full(count, NOBODY, np.int32)
        self.any_pending = False

    def split(self) -> None:
        """Change from two bytes to one."""
        self.granule = 1
        self.arrays = {name: np.repeat(array, 2) for name, array in self.arrays.items()}
        self.pending = np.repeat(self.pending, 2)

    def index(self, at: Array, size: int) -> Array:
        """Return the granules [n, size / granule] of accesses at byte offsets."""
        if size == 1 and self.granule == 2:
            self.split()
        start = at if self.granule == 1 else at >> 1
        return np.asarray(start[:, None] + np.arange(size // self.granule))


# write_*: of the last write; read_*: of the last reads; first_read: the epoch of the launch's first
FIELDS = (
    "writer",
    "write_epoch",
    "write_warp_epoch",
    "write_line",
    "reader",
    "read_warp",
    "read_epoch",
    "read_warp_epoch",
    "read_line",
    "first_read",
)


class Races:
    """The accesses of a launch since the barriers of each CTA and warp."""

    def __init__(self, program: Program) -> None:
        self.program, self.threads = program, program.threads
        self.epoch = self.launch_start = self.cta_start = 0
        self.warp_epochs = np.zeros(self.threads // 32, np.int32)
        self.logs: dict[int, Log] = {}  # by buffer
        self.late: dict[int, dict[int, int]] | None = None  # buffer -> byte -> who writes it
        self.is_late = False  # whether the race that was found is a read that may come too late
        self.open_copies: list[tuple[Log, Access]] = []
        self.copies: list[list[tuple[Log, Access]]] = []

    def start_launch(self) -> None:
        """Order everything after the accesses of an earlier launch."""
        self.epoch += 1
        self.launch_start = self.epoch
        self.logs = {}

    def start_cta(self, shared: Shared) -> None:
        """Start a CTA with its own shared memory."""
        self.epoch += 1
        self.cta_start = self.epoch
        self.logs[id(shared)] = Log(shared.size)
        self.open_copies, self.copies = [], []

    def barrier(self) -> None:
        """Order all accesses of the CTA before this point."""
        self.epoch += 1

    def warp_barrier(self, mask: Array | None) -> None:
        """Order the accesses of each warp before this point."""
        self.warp_epochs += 1 if mask is None else mask.reshape(-1, 32).any(1).astype(np.int32)

    def log(self, buffer: Buffer) -> Log:
        """Return the log of a buffer."""
        if id(buffer) not in self.logs:
            self.logs[id(buffer)] = Log(buffer.size)
        return self.logs[id(buffer)]

    # ---- accesses -------------------------------------------------------------------------------
    def read(self, access: Access) -> None:
        """Check reads."""
        log = self.log(access.buffer)
        index, fields = log.index(access.at, access.size), log.arrays
        self.check_pending(access, log, index)
        thread, warp, warp_epoch = self.who(access)
        bad = self.after_write(fields, index, thread, warp, warp_epoch)
        if bad.any():
            raise self.race(access, log, index, bad, "write")
        self.note_read(access.instruction, fields, index, thread, warp, warp_epoch)

    def write(self, access: Access, unchanged: Callable[[], Array] | None = None) -> None:
        """Check writes; `unchanged` tells which 16-bit halves [n, size / 2] have the bits already."""
        log = self.log(access.buffer)
        index, fields = log.index(access.at, access.size), log.arrays
        self.check_pending(access, log, index)
        thread, warp, warp_epoch = self.who(access)
        bad = self.after_write(fields, index, thread, warp, warp_epoch)
        kind = "write"
        after_read = self.after_read(fields, index, thread, warp, warp_epoch)
        if after_read.any():
            kind = "write" if bad.any() else "read"
            bad = bad | after_read
        if bad.any():
            other_cta = bad & self.other_cta(fields, index)
            if unchanged is not None and not other_cta.any():
                same = unchanged()
                bad = bad & ~(np.repeat(same, 2, -1) if same.shape != bad.shape else same)
            if bad.any() and not self.note_late(access, index, bad, kind, other_cta):
                raise self.race(access, log, index, bad, kind)
        fields["writer"][index] = thread
        fields["write_epoch"][index] = self.epoch
        fields["write_warp_epoch"][index] = warp_epoch
        fields["write_line"][index] = access.instruction.index

    def note_late(
        self, access: Access, index: Array, bad: Array, kind: str, other_cta: Array
    ) -> bool:
        """Note the writers of bytes that other threads of the CTA may read too late; return whether that is all.

        Threads that hold copies of an element read it, and one of them writes it. Whether the others use what they read
        is seen when their reads are poisoned: see `Execution.run_machine`.
        """
        late = kind == "read" and not isinstance(access.buffer, Shared) and not other_cta.any()
        if late and self.late is not None and not access.by_warp:
            writers = self.late.setdefault(id(access.buffer), {})
            threads = np.broadcast_to(access.threads[:, None], index.shape)
            pairs = zip(index[bad].tolist(), threads[bad].tolist(), strict=True)
            width = self.log(access.buffer).granule
            writers.update({granule * width: thread for granule, thread in pairs})
            return True
        self.is_late = late
        return False

    def who(self, access: Access) -> tuple[Array, Array, Array]:
        """Return the threads, their warps and the epochs of these warps, [n, 1] each."""
        warp = (access.threads // 32)[:, None]
        thread = WHOLE_WARP - warp if access.by_warp else access.threads[:, None]
        return thread, warp, self.warp_epochs[warp]

    def write_later(self, access: Access) -> None:
        """Check writes of cp.async, which are pending until their group is waited for."""
        self.write(access)
        log = self.log(access.buffer)
        log.pending[log.index(access.at, access.size)] = access.instruction.index
        log.any_pending = True
        self.open_copies.append((log, access))

    def commit(self) -> None:
        """Close a group of pending writes."""
        self.copies.append(self.open_copies)
        self.open_copies = []

    def wait(self, instruction: Instruction, pending: int) -> None:
        """Finish all groups but the last `pending`: their writes happen now, by their threads."""
        done = self.copies[: len(self.copies) - pending] if pending else self.copies
        self.copies = self.copies[len(done) :]
        for log, access in (each for group in done for each in group):
            index = log.index(access.at, access.size)
            log.arrays["writer"][index], _, log.arrays["write_warp_epoch"][index] = self.who(access)
            log.arrays["write_epoch"][index] = self.epoch
            log.pending[index] = NOBODY
        for log in {id(each[0]): each[0] for group in done for each in group}.values():
            log.any_pending = bool(self.copies or self.open_copies)

    # ---- rules ----------------------------------------------------------------------------------
    def after_write(
        self, fields: dict[str, Array], index: Array, thread: Array, warp: Array, warp_epoch: Array
    ) -> Array:
        """Tell which granules another thread has written without a barrier since."""
        epoch = fields["write_epoch"][index]
        recent = epoch >= self.launch_start
        if not recent.any():
            return recent
        writer = fields["writer"][index]
        same_warp = np.where(writer <= WHOLE_WARP, WHOLE_WARP - writer, writer // 32) == warp
        unordered = fields["write_warp_epoch"][index] == warp_epoch
        here = (epoch == self.epoch) & (writer != thread) & (~same_warp | unordered)
        return np.asarray(here | (recent & (epoch < self.cta_start)))

    def after_read(
        self, fields: dict[str, Array], index: Array, thread: Array, warp: Array, warp_epoch: Array
    ) -> Array:
        """Tell which granules another thread has read without a barrier since."""
        here = fields["read_epoch"][index] == self.epoch
        first = fields["first_read"][index]
        other_cta = (first >= self.launch_start) & (first < self.cta_start)
        if not here.any():
            return np.asarray(other_cta)
        reader_warp, reader = fields["read_warp"][index], fields["reader"][index]
        unordered = fields["read_warp_epoch"][index] == warp_epoch
        inside = (reader_warp == warp) & unordered & (reader != thread)
        return np.asarray((here & ((reader_warp != warp) | inside)) | other_cta)

    def other_cta(self, fields: dict[str, Array], index: Array) -> Array:
        """Tell which granules another CTA of this launch has touched."""
        touched = [fields["write_epoch"][index], fields["first_read"][index]]
        before = [(each >= self.launch_start) & (each < self.cta_start) for each in touched]
        return np.asarray(before[0] | before[1])

    def note_read(
        self,
        instruction: Instruction,
        fields: dict[str, Array],
        index: Array,
        thread: Array,
        warp: Array,
        warp_epoch: Array,
    ) -> None:
        """Remember who has read; several threads or warps become MANY."""
        here = fields["read_epoch"][index] == self.epoch
        before = fields["read_warp"][index]
        warps = np.where(here & (before != warp), MANY, warp)
        again = here & (before == warp) & (fields["read_warp_epoch"][index] == warp_epoch)
        readers = np.where(again & (fields["reader"][index] != thread), MANY, thread)
        for name, new in (("read_warp", warps), ("reader", readers)):
            array = fields[name]
            array[index] = new
            lost = array[index] != new  # several accesses of one instruction
            if lost.any():
                array[index[lost]] = MANY
        fields["read_epoch"][index] = self.epoch
        fields["read_warp_epoch"][index] = warp_epoch
        fields["read_line"][index] = instruction.index
        first = fields["first_read"]
        fresh = first[index] < self.launch_start
        if fresh.any():
            first[index[fresh]] = self.epoch

    # ---- reports --------------------------------------------------------------------------------
    def check_pending(self, access: Access, log: Log, index: Array) -> None:
        """Refuse an access of bytes that cp.async has not finished."""
        if log.any_pending and (bad := log.pending[index] >= 0).any():
            raise self.race(access, log, index, bad, "copy")

    def race(self, access: Access, log: Log, index: Array, bad: Array, kind: str) -> RaceError:
        """Return the error for the first granule of `bad`."""
        row, column = (int(each[0]) for each in np.nonzero(bad))
        granule = index[row, column]
        line = log.pending if kind == "copy" else log.arrays[f"{kind}_line"]
        other = self.program.instructions[int(line[granule])]
        by = log.arrays["reader" if kind == "read" else "writer"][granule]
        who = f"thread {by}" if by >= 0 else "several threads" if by == MANY else "a warp"
        where = (
            "shared memory"
            if isinstance(access.buffer, Shared)
            else f"buffer {access.buffer.label}"
        )
        stamp = log.arrays["first_read" if kind == "read" else "write_epoch"][granule]
        if kind != "copy" and self.launch_start <= stamp < self.cta_start:
            who += " of another CTA"
        error = refuse(
            RaceError,
            access.instruction,
            expected=f"a barrier between two accesses of byte {granule * log.granule} of {where}",
            received=f"{kind} by {who} at {place(other)}, then thread {int(access.threads[row])}",
            remedy=remedy_of(kind, isinstance(access.buffer, Shared), "another CTA" in who),
        )
        assert isinstance(error, RaceError)
        error.other_line, error.other_source = other.line, other.source
        return error


def remedy_of(kind: str, shared: bool, between_ctas: bool) -> str:
    """Return what a kernel's author can do about a race."""
    if kind == "copy":
        return "wait for the copy (cp.async.wait_group) and add a barrier between them"
    if between_ctas:
        return "use two launches, or write to another tensor than the one that is read"
    if shared:
        return "add a barrier between them (tl.debug_barrier())"
    return (
        "write to another tensor than the one that is read; or, if every program reads only what it writes, launch "
        "with fewer warps or larger blocks, so that no two threads load one element"
    )


# Races between threads and asynchronous work: the race check, and beside it the open work of the CTA.


class AsynchronousRaces(Races):
    """The race check of a program with asynchronous work; see [Note: order of asynchronous work]."""

    work: Asynchronous
    barriers: Mbarriers | None = None

    def start(self, work: Asynchronous) -> None:
        """Start a CTA with its own open work."""
        self.work, self.barriers = work, None
        self.groups: list[list[tuple[Instruction, Array]]] = [[]]

    def read(self, access: Access) -> None:
        """Check reads."""
        super().read(access)
        if isinstance(access.buffer, Shared):
            pieces = self.pieces(access)
            self.work.touch(access.instruction, pieces, self.mask(access.threads), write=False)

    def write(self, access: Access, unchanged: Callable[[], Array] | None = None) -> None:
        """Check writes."""
        super().write(access, unchanged)
        bulk = access.instruction.opcode.startswith("cp.async.bulk")
        if isinstance(access.buffer, Shared) and not bulk:
            pieces = self.pieces(access)
            self.work.store(access.instruction, pieces, self.mask(access.threads))

    def write_later(self, access: Access) -> None:
        """Check writes of cp.async, which are pending until their group is waited for."""
        super().write_later(access)
        if access.at.size:
            pieces = self.pieces(access)
            self.work.touch(access.instruction, pieces, self.mask(access.threads), write=True)
            self.work.copied[pieces] = access.instruction.index + 1
            self.groups[-1].append((access.instruction, pieces))

    def commit(self) -> None:
        """Close a group of pending writes."""
        super().commit()
        self.groups.append([])

    def wait(self, instruction: Instruction, pending: int) -> None:
        """Finish all groups but the last `pending`: they are now writes that threads made."""
        super().wait(instruction, pending)
        ended = max(len(self.groups) - 1 - pending, 0)
        for group in self.groups[:ended]:
            for copy, pieces in group:
                self.work.copied[pieces] = 0
                self.work.written_by_threads(copy, pieces)
        del self.groups[:ended]

    def barrier(self) -> None:
        """Order all accesses of the CTA before this point."""
        super().barrier()
        self.work.barrier()
        if self.barriers is not None:
            self.barriers.synchronise()

    def forget(self, buffer: Buffer, at: Array, size: int) -> None:
        """Take the wait of all threads for a bulk copy: it orders its writes, without a barrier."""
        log = self.log(buffer)
        log.arrays["write_epoch"][log.index(at, size)] = NOBODY

    def mask(self, threads: Array) -> Array:
        """Return the threads as one bool each."""
        made = np.zeros(self.threads, bool)
        made[threads] = True
        return made

    def pieces(self, access: Access) -> Array:
        """Return the pieces of shared memory; refuse an ordinary access of a live barrier object."""
        if self.barriers is not None and self.barriers.touches(access.at, access.size):
            raise refuse(
                RaceError,
                access.instruction,
                expected="a barrier object to be used by mbarrier instructions only",
                received="another access of its bytes",
                remedy="end the barrier object with mbarrier.inval first",
            )
        return self.work.pieces(access.at, access.size)
