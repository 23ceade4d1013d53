"""One rank: what a process would own, and which rank and strand the current thread is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from isobit.errors import UnsupportedError
from isobit.simulator.findings import Findings, Killed, copy_error
from isobit.simulator.program.process_state import fresh_state
from isobit.simulator.schedule import Schedule, Waiting

# Ranges of memory that tensors occupy, and whether two sets of tensors overlap.

Memory = Mapping[int, Sequence[tuple[int, int]]]  # storage -> [start, end) in bytes


def memory_of(tensors: Iterable[Tensor]) -> Memory:
    """Return the bytes that tensors occupy, by storage, so that slices of one buffer are distinct.

    Wrapper subclasses (DTensor) are skipped: operators see their inner tensors as well.
    """
    memory: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        if (
            is_traceable_wrapper_subclass(tensor)
            or tensor.layout is not torch.strided
            or not tensor.numel()
        ):
            continue
        first, width = int(tensor.storage_offset()), tensor.element_size()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = first * width
        runs = memory.setdefault(tensor.untyped_storage()._cdata, [])
        if runs and runs[-1][1] == start:  # consecutive slices of one buffer
            start = runs.pop()[0]
        runs.append((start, (last + 1) * width))
    return memory


def overlap(left: Memory, right: Memory) -> bool:
    """Return whether any byte belongs to both."""
    return any(
        a < d and c < b
        for storage in left.keys() & right.keys()
        for a, b in left[storage]
        for c, d in right[storage]
    )


MOST_RETRIES = 100  # calls that a rank may make after the run was stopped

_here = threading.local()


class Pending(Protocol):
    """A handle that the rank has not waited for (`torch/work.py`)."""

    site: str
    memory: Memory
    torchs_own: bool

    @property
    def what(self) -> str:
        """The call in words."""


class StartedThread(Protocol):
    """A thread that the rank started (`program/threads.py`)."""

    thread: threading.Thread
    cancelled: bool

    def join(self, seconds: float | None) -> None:
        """Wait for the end of the thread."""

    def cancel(self) -> None:
        """End the thread at its next wait."""


class Rank:
    """One rank of a run.

    Attributes:
        index: Its number.
        world_size: The number of ranks.
        watch: What the run watches: "bits", "finite", "reads", "training".
        skew: Microseconds by which its clock is ahead of the schedule.
        variables: Its environment variables.
        pending: Handles that it has not waited for.
        calls: Number of its communication calls.
        incarnations: How often it has made a process group of each name.
        groups: Its table of process groups, as torch keeps one.
        folder: Its current folder, if it changed it.
        questions: How often it asked for the time.
        time_loop: (calls, how often it asked for the time a thousand times since).
        asked, asked_in: What else it asked for, and in which turn and after how many calls.
        started: Its threads besides the main one, by strand.
        thread_ids: Identifiers of its threads, by strand.
        released: By strand, the error that ends its wait.
        value, error: What its function returned or raised.
        left: Whether its function has ended.
        death: What a fault ended it with, even if the program caught that.
        state: Its process-wide state while another rank runs.
        accelerator: The type of the devices that the world serves, or nothing.
        device: The number of its current device.
        device_chosen: Whether it has chosen a device, or asked for the library of devices to start.
        device_marks: The devices of its tensors; see simulator/accelerator.
        devices_used: The stack at the first use of each device that it used.
        stored_devices: The devices of the tensors that are being saved or loaded, by storage.
        on_host_read: Called when a tensor is pickled and the like, if reads are watched.
        spawned: Whether it is inside a function that torch.multiprocessing.spawn was to run.
    """

    def __init__(
        self,
        index: int,
        world_size: int,
        seed: int,
        variables: dict[bytes, bytes],
        schedule: Schedule,
        findings: Findings,
        watch: Collection[str] = (),
        skew: int = 0,
    ) -> None:
        """Start with the state of a new process."""
        self.index, self.world_size = index, world_size
        self.schedule, self.findings, self.watch, self.skew = schedule, findings, watch, skew
        self.variables = variables
        self.pending: dict[int, Pending] = {}
        self.calls = self.retries = 0
        self.incarnations: dict[str, int] = {}
        self.groups: Any = None
        self.folder = ""
        self.questions = 0
        self.time_loop = (0, 0)
        self.asked_in, self.asked = (-1, 0), dict[object, int]()
        self.started: dict[int, StartedThread] = {}
        self.thread_ids: dict[int, int] = {}
        self.released: dict[int, BaseException] = {}
        self.value: Any = None
        self.error: BaseException | None = None
        self.left = False
        self.death: BaseException | None = None
        self.state = fresh_state(seed, index)
        self.accelerator, self.device, self.device_chosen = "", 0, False
        self.device_marks: Any = None
        self.devices_used: dict[int, list[str]] = {}
        self.stored_devices: dict[int, int] = {}
        self.on_host_read: Callable[[str, Tensor], None] | None = None
        self.spawned = False

    @property
    def clock(self) -> int:
        """The virtual time of the rank, in microseconds."""
        return self.schedule.clocks[self.index]

    @clock.setter
    def clock(self, value: int) -> None:
        self.schedule.clocks[self.index] = value

    @property
    def others(self) -> list[int]:
        """All other ranks of the world."""
        return [index for index in range(self.world_size) if index != self.index]

    @property
    def communicating(self) -> bool:
        """Whether this thread is inside a call, where the simulator itself reads and writes buffers."""
        return getattr(_here, "communicating", False)

    @communicating.setter
    def communicating(self, value: bool) -> None:
        _here.communicating = value

    def check(self) -> None:
        """Raise the error that this strand was released with, or the one that stopped the run."""
        if self.death is not None:  # the `finally` of a program may still make calls
            raise Killed(str(self.death))
        strand = current_strand()
        released = self.released.pop(strand, None)
        if released is not None:
            raise released
        if strand in self.started and self.started[strand].cancelled:
            raise Killed("its rank ended")
        if self.findings.root is not None:
            self.retries += 1
            if self.retries > MOST_RETRIES:  # the program catches the error and retries forever
                raise Killed("it retried again and again after the run was stopped")
            raise copy_error(self.findings.root)

    def wait_for(self, waiting: Waiting, done: bool) -> None:
        """Pass the baton on until `waiting` is over, unless it is `done`."""
        if not done:
            self.check()
            self.schedule.block(current_strand(), waiting)
        self.check()


def current() -> Rank:
    """Return the rank of the current thread."""
    rank: Rank | None = getattr(_here, "rank", None)
    if rank is None:
        raise UnsupportedError(
            expected="a communication call on a thread of the program's own",
            received=f"one on thread {threading.current_thread().name!r}, which a library started",
            remedy="make the call in a function of the script: on its main thread, a threading.Thread or a "
            "ThreadPoolExecutor",
        )
    return rank


def inside() -> bool:
    """Return whether the current thread is a strand of a rank."""
    return getattr(_here, "rank", None) is not None


def owner() -> Rank | None:
    """Return the rank of the current thread, also if a library started it and it never has the baton."""
    rank: Rank | None = getattr(_here, "rank", None)
    return getattr(_here, "served", None) if rank is None else rank


def current_strand() -> int:
    """Return the number of the current thread in the schedule."""
    number: int = _here.strand
    return number


def has_baton() -> bool:
    """Return whether the current thread can pass the baton: not in a process that a rank forked."""
    return getattr(_here, "rank", None) is not None and not getattr(_here, "forked", False)


def _note_fork() -> None:
    _here.forked = inside()


os.register_at_fork(after_in_child=_note_fork)


@contextmanager
def acting_as(rank: Rank, strand: int) -> Iterator[None]:
    """Make the current thread a strand of a rank."""
    _here.rank, _here.strand, _here.communicating = rank, strand, False
    try:
        yield
    finally:
        _here.rank = None


@contextmanager
def serving(rank: Rank) -> Iterator[None]:
    """Make the current thread one that a library started for a rank, outside the schedule."""
    _here.served = rank
    try:
        yield
    finally:
        _here.served = None
