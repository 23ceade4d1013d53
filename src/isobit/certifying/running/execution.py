"""Run a function once: a pilot that only looks at launches, or an execution of every launch in the machine."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from isobit.certifying.machine import Buffer, Machine, Pointer
from isobit.certifying.machine.predicates import Compared, noting
from isobit.certifying.records import KernelFacts
from isobit.certifying.running.capture import Choices, captured
from isobit.certifying.running.compile import (
    Compiled,
    Compiler,
    Specialised,
    absent_driver,
    specialise,
)
from isobit.certifying.running.exposed import Exposed, check_written, key_of
from isobit.certifying.running.refusals import RaceError, place
from isobit.certifying.running.stand_in import standing_in
from isobit.certifying.running.storages import (
    Arrangement,
    Inputs,
    Names,
    Storages,
    element_places,
    layout_of,
    read_halves,
)
from isobit.certifying.running.watch import SEED, Known, Watch, room_of, storage_of
from isobit.errors import ArgumentError, IsobitError, UnsupportedError
from isobit.order.engines import ENGINE_OF_TARGET

Function = Callable[..., Any]
HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # isobit's own package


class FunctionError(ArgumentError):
    """An error that the user's function raised, with its place."""


@dataclass
class View:
    """A tensor that a pilot saw as an argument: the facts from which names are made; `room` is of its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    argument: str
    stride: tuple[int, ...] = ()
    offset: int = 0
    content: torch.Tensor | None = None
    room: int = 0


@dataclass
class Pilot:
    """Receives launches and only notes their tensors.

    Attributes:
        views: storage key -> its views, in the sequence of their first use.
        outputs: shapes and dtypes of what the function returned.
        launches: names of the kernels that it launched.
        known: storages that outlive the call.
    """

    known: Known = field(default_factory=Known)
    watch: Watch | None = None
    views: dict[str, list[View]] = field(default_factory=dict)
    outputs: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)
    layouts: set[tuple[Any, ...]] = field(default_factory=set)
    choices: Choices = field(default_factory=Choices)
    keeps: bool = True  # whether what the call makes is remembered
    grad: bool = False  # whether torch records gradients
    target: str = ""

    def launch(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Note the tensors of a launch."""
        self.launches.append(kernel.__name__)
        self.call_grid(kernel, grid, arguments, named)
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        assert self.watch is not None
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                continue
            self.alive.append(value)
            text = f"{name} of {kernel.__name__}"
            key = key_of(self.watch, value, text)
            layout = (key, storage_of(value), *layout_of(value))
            if layout not in self.layouts and value.numel():
                self.layouts.add(layout)
                with _without_modes():
                    copy = value.detach().clone()
                place = value.stride(), int(value.storage_offset())
                view = View(tuple(value.shape), value.dtype, text, *place, copy, room_of(value))
                self.views.setdefault(key, []).append(view)

    def call_grid(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Call a grid that is a function while torch is watched: it may read values."""
        if not callable(grid):
            return
        try:
            with _without_modes():
                bound = specialise(kernel, self.target, arguments, named).bound
        except IsobitError:
            return  # the execution says what it is
        grid(bound)

    def knows(self, storage: int) -> bool:
        """Return False: a pilot does not judge."""
        return False

    def wrote(self, storage: int) -> bool:
        """Return False: a pilot does not judge."""
        return False


@dataclass
class Dependence:
    """Which storages the launches before may still use, if launches overlap (`launch_pdl=True`).

    A launch with programmatic dependent launch begins while the one before is running; what that one does is ordered
    only before `griddepcontrol.wait`. If it has not waited either, those before it may be running, too.
    """

    written: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    earlier: tuple[set[int], set[int]] = (set(), set())  # of launches that nobody has waited for

    def before(self, machine: Machine, storages: Storages, overlaps: bool) -> None:
        """Tell the machine which buffers are in use."""
        if not overlaps:
            self.written, self.read, self.earlier = set(), set(), (set(), set())
            return
        for storage, held in storages.held.items():
            if held.buffer is None:
                continue
            if storage in self.earlier[0] | self.written:
                machine.written_before.add(id(held.buffer))
            if storage in self.earlier[1] | self.read:
                machine.read_before.add(id(held.buffer))
            for stored, found in zip(self.earlier, machine.never_waited, strict=True):
                if storage in stored:
                    found.add(id(held.buffer))

    def after(self, machine: Machine, storages: Storages, overlaps: bool) -> None:
        """Note what a launch used."""
        used = {s: held for s, held in storages.held.items() if held.buffer is not None}
        changed = {s for s, held in used.items() if held.buffer and held.buffer.changed}
        if overlaps and not machine.always_waited:
            self.earlier = (self.earlier[0] | self.written, self.earlier[1] | self.read)
        else:
            self.earlier = (set(), set())
        self.written, self.read = changed, set(used)


@dataclass
class Execution:
    """Receives launches and executes them; afterwards it has the names and bits of the outputs.

    Attributes:
        names: one array [elements] per output, in the order of its index.
        bits: one array of bytes [elements, element size] per output.
        unwritten: elements of the outputs in uninitialised memory that no kernel wrote.
        machines: the machine and the kernel of each launch, if they record.
    """

    compiler: Compiler
    inputs: Inputs
    labels: Sequence[int]
    nonce: int = 0
    record: bool = False
    known: Known = field(default_factory=Known)
    arrangement: Arrangement = field(default_factory=Arrangement)
    storages: Storages | None = None
    earlier: Storages | None = (
        None  # of the call before this one, if it is to find what that left behind
    )
    dependence: Dependence = field(default_factory=lambda: Dependence())
    launched: list[Compiled] = field(default_factory=list)
    machines: list[tuple[Machine, Compiled]] = field(default_factory=list)
    executed: int = 0
    remarks: list[str] = field(default_factory=list)  # of the machine
    approximate: set[str] = field(default_factory=set)  # opcodes without the hardware's bits
    seconds: float = 0.0
    names: list[Names] = field(default_factory=list)
    bits: list[np.ndarray[Any, Any]] = field(default_factory=list)
    unwritten: int = 0
    choices: Choices = field(default_factory=Choices)
    # (digest of a kernel, instruction) -> values of a comparison that a launch shares, and where it is
    compared: dict[tuple[str, int], set[Compared]] = field(default_factory=dict)
    places: dict[tuple[str, int], str] = field(default_factory=dict)
    look: Callable[[Machine, Compiled, Specialised], None] | None = (
        None  # at a machine before it runs
    )

    @property
    def facts(self) -> list[KernelFacts]:
        """The static facts of each launch."""
        return [one.facts for one in self.launched]

    def attach(self, watch: Watch) -> None:
        """Begin a run."""
        labels = np.asarray(self.labels, dtype=np.uint64)
        self.storages = Storages(
            watch, self.inputs, labels, self.nonce, self.arrangement, self.record
        )
        self.storages.earlier = self.earlier

    def launch(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Compile and execute a launch; buffers are written in place."""
        assert self.storages is not None
        with _without_modes():
            call = specialise(kernel, self.compiler.target, arguments, named)
            size = grid(call.bound) if callable(grid) else grid
            size = (size,) if isinstance(size, int) else tuple(int(each) for each in size)
            made = self.compiler.compile(kernel, call)
            self.launched.append(made)
            texts = [f"{name} of {kernel.__name__}" for name in call.names]
            given = self.storages.arguments(call.arguments, texts)
            label_buffers(given, call.names)
            if 0 in size:
                return
            engine = ENGINE_OF_TARGET[self.compiler.target]
            overlaps = bool(getattr(call.options, "launch_pdl", False))

            def prepared() -> Machine:
                machine = Machine(made.program, engine=engine, names=True, record=self.record)
                assert self.storages is not None
                self.dependence.before(machine, self.storages, overlaps)
                for at in made.comparisons:
                    instruction = made.program.instructions[at]
                    values = self.compared.setdefault((made.facts.digest, at), set())
                    machine.steps[at] = noting(instruction, machine.steps[at], values)
                    self.places[made.facts.digest, at] = f"{made.name}, at {place(instruction)}"
                if self.look is not None:
                    self.look(machine, made, call)
                return machine

            machine = self.run_machine(prepared, (*size, 1, 1)[:3], given, made)
            self.storages.end_launch()
            self.dependence.after(machine, self.storages, overlaps)
            for storage, held in self.storages.held.items():
                if held.buffer is not None and held.buffer.changed:
                    text = f"{held.buffer.label} of {kernel.__name__}"
                    check_written(self.storages.watch, storage, text)
            self.executed += machine.executed
            self.remarks += [
                f"{made.name}: {what}, at {at}"
                for what, at in machine.facts.items()
                # A sum alone cannot be fused: static facts count the products that can be.
                if "ptxas may fuse" not in what
            ]
            self.approximate |= machine.approximate
            if self.record:
                self.machines.append((machine, made))

    def run_machine(
        self,
        prepared: Callable[[], Machine],
        size: Sequence[int],
        given: Sequence[Buffer | Pointer | int | float],
        made: Compiled,
    ) -> Machine:
        """Run a kernel. A read that may come too late is no race if nothing that is stored depends on it.

        A kernel that works in place may have more threads than elements: several load one element, and one of them
        stores it. Such reads are poisoned with names that equal no others, twice: if memory then has the same
        names, nobody uses them.
        """
        assert self.storages is not None
        kept = self.storages.snapshot()
        machine = prepared()
        try:
            return machine.run(size, given, shared_bytes=made.shared_bytes)
        except RaceError:
            if machine.races is None or not machine.races.is_late:
                raise
        late: dict[int, dict[int, int]] = {}
        memory = []
        for attempt in range(3):
            self.storages.put_back(kept)
            machine = prepared()
            assert machine.races is not None
            machine.races.late = late if not attempt else {}
            machine.poison = late if attempt else {}
            machine.run(size, given, shared_bytes=made.shared_bytes)
            memory.append([held.names.copy() for held in self.storages.held.values()])
        if any(not np.array_equal(a, b) for a, b in zip(memory[1], memory[2], strict=True)):
            self.storages.put_back(kept)
            machine = prepared()
            machine.run(size, given, shared_bytes=made.shared_bytes)  # raises what it raised
        return machine

    def knows(self, storage: int) -> bool:
        """Tell whether a storage was an argument of a launch."""
        return self.storages is not None and self.storages.knows(storage)

    def wrote(self, storage: int) -> bool:
        """Tell whether a kernel wrote a storage."""
        return self.storages is not None and self.storages.wrote(storage)

    def read(self, outputs: Sequence[torch.Tensor]) -> None:
        """Read the names and bits of the outputs."""
        assert self.storages is not None
        if not any(tensor.numel() for tensor in outputs):
            raise UnsupportedError(
                expected="outputs with at least one element",
                received=", ".join(str(list(tensor.shape)) for tensor in outputs),
                remedy="choose sizes that are not zero",
            )
        for number, tensor in enumerate(outputs):
            storage = storage_of(tensor)
            if tensor.numel() and not self.storages.wrote(storage):
                raise UnsupportedError(
                    expected="outputs that a kernel wrote",
                    received=f"output {number}, {list(tensor.shape)}: no kernel wrote it",
                    remedy="return the tensor that the kernel stores to; it needs at least one launch",
                )
            if not tensor.numel():
                self.names.append(np.zeros(0, dtype=np.uint64))
                self.bits.append(np.zeros((0, tensor.element_size()), dtype=np.uint8))
                continue
            held = self.storages.held[storage]
            places, size = element_places(tensor), tensor.element_size()
            self.names.append(read_halves(held.names, places, size))
            stays = self.names[-1] == read_halves(held.first, places, size)
            if held.uninitialised:  # elsewhere, what no kernel wrote stays as it was
                self.unwritten += int(stays.sum())
            elif (stays & ~held.named[places * size]).any():
                raise UnsupportedError(
                    expected="outputs of which kernels are given all elements",
                    received=f"output {number}, {list(tensor.shape)}: kernels were given only a part of it",
                    remedy="pass the whole tensor to the kernel, or return the part that it was given",
                )
            self.bits.append(held.data[(places * size)[:, None] + np.arange(size)].copy())


def label_buffers(given: Sequence[Buffer | Pointer | int | float], names: Sequence[str]) -> None:
    """Give each buffer the name of the first argument that points into it, for messages."""
    for name, value in zip(names, given, strict=True):
        if isinstance(value, (Buffer, Pointer)):
            buffer = value if isinstance(value, Buffer) else value.buffer
            buffer.label = buffer.label or name


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def call(
    function: Function, given: Mapping[str, Any], receiver: Pilot | Execution, target: str
) -> tuple[torch.Tensor, ...]:
    """Call a function with its launches sent to a receiver; return the tensors that it returned.

    Raises:
        FunctionError: If the function raises an error of its own, or returns something that is no tensor.
    """
    watch = Watch(receiver, receiver.known, lazy=isinstance(receiver, Pilot) and not receiver.keeps)
    if isinstance(receiver, Pilot):
        receiver.watch, receiver.target = watch, target
    else:
        receiver.attach(watch)
    began = time.perf_counter()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.set_grad_enabled(isinstance(receiver, Pilot) and receiver.grad),
            absent_driver(target),
            standing_in(target),
            captured(receiver, receiver.choices),
            watch,
            Exposed(watch),
        ):
            torch.manual_seed(SEED)
            found = function(**given)
        outputs = as_outputs(function, found)
        if isinstance(receiver, Pilot):
            receiver.outputs = [(tuple(t.shape), t.dtype) for t in outputs]
            if receiver.keeps:
                watch.keep()
        else:
            receiver.read(outputs)
        return outputs
    except IsobitError:
        raise
    except (Exception, SystemExit) as error:  # its exit code is not the verdict
        if is_internal(error):
            raise
        raise function_error(function, error) from error
    finally:
        if isinstance(receiver, Execution):
            receiver.seconds = time.perf_counter() - began
            if receiver.storages is not None:
                receiver.storages.restore()


def as_outputs(function: Function, found: Any) -> tuple[torch.Tensor, ...]:
    """Return what a function returned as a tuple of tensors."""
    outputs = (found,) if isinstance(found, torch.Tensor) else found
    if not isinstance(outputs, (tuple, list)) or not outputs:
        outputs = (None,)
    if not all(isinstance(each, torch.Tensor) for each in outputs):
        raise FunctionError(
            expected=f"{name_of(function)} to return a tensor, or a tuple of tensors",
            received=describe_returned(found),
            remedy="return the tensor, or a tuple of the tensors, that the kernels write",
        )
    return tuple(outputs)


def describe_returned(found: Any) -> str:
    """Return the type of what a function returned, and of what is in it."""
    name = type(found).__name__
    if isinstance(found, (tuple, list)):
        return f"a {name} of {', '.join(type(each).__name__ for each in found[:6]) or 'nothing'}"
    return name


def function_error(function: Function, error: BaseException) -> FunctionError:
    """Return an error that names the line of the user's code where it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    first = (str(error).strip().splitlines() or [""])[0]
    remedy = "mend the function; it must run on a machine without a GPU"
    if "CUDA" in str(error) or "cuda" in str(error) or "NVIDIA" in str(error):
        remedy = (
            'make tensors on the CPU, without device="cuda" or .cuda(): nothing runs on a GPU here'
        )
    return FunctionError(
        expected=f"{name_of(function)} to run",
        received=f"{type(error).__name__}{where}: {first}",
        remedy=remedy,
    )


def is_internal(error: BaseException) -> bool:
    """Tell whether isobit's own code raised an error: a fault of isobit, not of the function."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return os.path.abspath(last).startswith(HOME + os.sep)


def _is_users(file: str) -> bool:
    return not os.path.abspath(file).startswith(HOME + os.sep) and "site-packages" not in file


def name_of(function: Function) -> str:
    """Return a function's name."""
    return str(getattr(function, "__name__", type(function).__name__))


# Progress of a certificate: which step is running, of how many.

Progress = Callable[[str, int, int], None]


@dataclass
class Steps:
    """Counts configurations; `progress` is called with a text, the steps done and all steps."""

    progress: Progress | None = None
    done: int = 0
    total: int = 0

    def expect(self, here: int, targets_to_come: int) -> None:
        """Set how many configurations this target has; later targets are expected to have as many."""
        self.total = self.done + here * (1 + targets_to_come)

    def tell(self, text: str) -> None:
        """Say what is running."""
        if self.progress is not None:
            self.progress(text, self.done, self.total)

    def finish(self) -> None:
        """Count one configuration."""
        self.done += 1
