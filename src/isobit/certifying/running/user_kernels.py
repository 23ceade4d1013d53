"""Run the Triton kernels that ordinary code launches on CPU tensors: compiled for a GPU, in the PTX machine.

[Note: kernels without a GPU]
While `kernels_in_machine` is open, `kernel[grid](...)` compiles the kernel for the target and runs its PTX on the
memory of the CPU tensors it is given. Wrapper code, `autograd.Function`s and torch operators between two launches run
as they are. Nothing is measured, so an autotuned kernel uses its first configuration unless another one is chosen. Bits
are those of the compiled code, except for the opcodes in `Running.approximate`, which each GPU approximates in its own
way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from isobit.certifying.machine import Buffer, Machine, Pointer
from isobit.certifying.running.backends import compile_once
from isobit.certifying.running.capture import Choices, captured
from isobit.certifying.running.compile import LaunchError, absent_driver, check_target, specialise
from isobit.certifying.running.execution import label_buffers
from isobit.certifying.running.refusals import AddressError, FloatAtomicError, RaceError
from isobit.certifying.running.storages import ALIGNED, first_byte
from isobit.certifying.running.watch import storage_of
from isobit.errors import ArgumentError, EngineError, IsobitError
from isobit.foundation.machine import keeping_subnormals
from isobit.order.engines import ENGINE_OF_TARGET

# What is wrong with a kernel itself; every other error says what the machine cannot run.
FAULTS = (AddressError, RaceError, FloatAtomicError)


class ResourcesError(EngineError):
    """A configuration of a kernel that needs more than the GPU has; Triton's autotuner leaves it out, too."""

    kernel = ""


@dataclass
class Running:
    """What ran while the context was open.

    Attributes:
        target: The GPU that kernels were compiled for.
        choices: The configuration of each autotuned kernel, and which there are.
        kernels: Names of the kernels, with the number of their launches.
        approximate: Opcodes whose bits differ between GPUs.
    """

    target: str
    choices: Choices = field(default_factory=Choices)
    kernels: dict[str, int] = field(default_factory=dict)
    approximate: set[str] = field(default_factory=set)

    def skip_configuration(self, error: BaseException) -> bool:
        """Choose the next configuration of an autotuned kernel that needs too much; return whether there is one."""
        if not isinstance(error, ResourcesError) or error.kernel not in self.choices.seen:
            return False
        texts, chosen = self.choices.seen[error.kernel], dict(self.choices.chosen)
        at = texts.index(chosen.get(error.kernel, texts[0])) + 1
        if at == len(texts):
            return False
        self.choices.chosen = chosen | {error.kernel: texts[at]}
        return True

    def knows(self, storage: int) -> bool:
        """Return False: values are bits here, so torch may read and write them."""
        return False

    def wrote(self, storage: int) -> bool:
        """Return False, as `knows` does."""
        return False

    def launch(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Compile and run one kernel.

        Raises:
            EngineError: If the machine cannot run it.
            AddressError: If it reads or writes outside the tensors it is given.
            FloatAtomicError: If it adds floats in an order that is not defined.
        """
        self.kernels[kernel.__name__] = self.kernels.get(kernel.__name__, 0) + 1
        try:
            self.run(kernel, grid, arguments, named)
        except (*FAULTS, EngineError):
            raise
        except IsobitError as error:
            kind = ResourcesError if isinstance(error, LaunchError) else EngineError
            found = kind(
                expected=f"{kernel.__name__} to run without a GPU: {error.expected}",
                received=error.received,
                remedy=f"{error.remedy}; or run it on a GPU: --device cuda",
            )
            if isinstance(found, ResourcesError):
                found.kernel = kernel.__name__
            raise found from error

    @keeping_subnormals
    def run(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Run the PTX of a launch on the memory of its tensors."""
        call = specialise(kernel, self.target, arguments, named)
        size = grid(call.bound) if callable(grid) else grid
        size = (size,) if isinstance(size, int) else tuple(int(each) for each in size)
        compiled = compile_once(self.target, kernel, call)
        if 0 in size:
            return
        engine = ENGINE_OF_TARGET[self.target]
        machine = Machine(compiled.program, engine, names=False, races=False)
        given = buffers_of(call.arguments)
        label_buffers(given, call.names)
        machine.run((*size, 1, 1)[:3], given, shared_bytes=compiled.shared_bytes)
        self.approximate |= machine.approximate


def buffers_of(values: Sequence[Any]) -> list[Buffer | Pointer | int | float]:
    """Return the arguments of a launch; tensors of one storage are pointers into one buffer.

    Raises:
        ArgumentError: If a tensor is not on the CPU.
    """
    starts: dict[int, list[int]] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise ArgumentError(
                    expected="tensors on the CPU: nothing runs on a GPU here",
                    received=f"a tensor {list(value.shape)} on {value.device}",
                    remedy="make tensors on the device of the inputs, as torch.empty_like does",
                )
            starts.setdefault(storage_of(value), []).append(first_byte(value))
    buffers: dict[int, tuple[Buffer, int]] = {}
    found: list[Buffer | Pointer | int | float] = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            found.append(value)
            continue
        storage = storage_of(value)
        if storage not in buffers:
            places = starts[storage]
            # A buffer of several views begins at a multiple of what vector accesses are aligned to.
            begin = places[0] if len(set(places)) == 1 else min(places) // ALIGNED * ALIGNED
            whole = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy()
            buffers[storage] = Buffer(np.asarray(whole)[begin:]), begin
        buffer, begin = buffers[storage]
        offset = first_byte(value) - begin
        found.append(Pointer(buffer, offset) if offset else buffer)
    return found


@contextmanager
def kernels_in_machine(target: str = "sm_90") -> Iterator[Running]:
    """Run every Triton kernel that is launched while the context is open without a GPU.

    Args:
        target: The GPU to compile for: "sm_80" (A100), "sm_90" (H100), "sm_100" (B200) or another one that `certify`
            knows.

    Returns:
        A context manager with the record of what ran. It holds for all threads.

    Raises:
        ArgumentError: If the target is not known, Triton's interpreter is on, or another such context is open.
        EngineError: If Triton is not installed.
    """
    running = Running(check_target(target))
    with absent_driver(target), captured(running, running.choices):
        yield running
