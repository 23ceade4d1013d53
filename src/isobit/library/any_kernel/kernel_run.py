"""How `isobit check` runs a kernel: by torch on a device, or Triton kernels without a GPU, in the PTX machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from isobit.errors import ArgumentError, EngineError, IsobitError, in_one_line

if TYPE_CHECKING:
    from isobit.certifying.running.user_kernels import Running

INTERPRET = "TRITON_INTERPRET"
# What Triton says of tensors on the CPU: without a driver, and with one.
WANTED = re.compile("active drivers|cannot be accessed from Triton")
Result = TypeVar("Result")


@dataclass
class KernelRun:
    """What runs a kernel while the context of `running_kernels` is open.

    Attributes:
        device: Where its tensors are.
        target: The GPU that Triton kernels are compiled for, if there is no GPU.
        machine: The record of the PTX machine; None as long as nothing has asked for Triton.
        notes: More that the output must say.
        ignored: Whether TRITON_INTERPRET was set, and set aside.
    """

    device: str
    target: str
    ignored: bool = False
    machine: Running | None = None
    notes: list[str] = field(default_factory=list)
    opened: ExitStack = field(default_factory=ExitStack)

    def attempt(self, action: Callable[[], Result]) -> Result:
        """Do something; where it fails for want of a Triton driver, again with kernels in the PTX machine."""
        try:
            found = action()
        except (Exception, SystemExit) as error:
            if not self.enter_machine(needed=bool(WANTED.search(in_one_line(error)))):
                raise
            return action()
        self.enter_machine(needed=False)
        return found

    def attempt_configurations(self, action: Callable[[], Result]) -> Result:
        """Do something; while a configuration of an autotuned kernel does not fit the GPU, again with the next one."""
        while True:
            try:
                return self.attempt(action)
            except EngineError as error:
                if self.machine is None or not self.machine.skip_configuration(error):
                    raise

    def enter_machine(self, needed: bool) -> bool:
        """Send Triton's launches to the PTX machine, if Triton is loaded or needed; return whether it did so now."""
        wanted = self.device == "cpu" and (needed or "triton" in sys.modules)
        if not wanted or self.machine is not None:
            return False
        from isobit.certifying.running.user_kernels import kernels_in_machine

        self.machine = self.opened.enter_context(kernels_in_machine(self.target))
        return True

    @property
    def compiled(self) -> bool:
        """Whether a Triton kernel ran in the machine."""
        return self.machine is not None and bool(self.machine.kernels)

    @property
    def autotuned(self) -> bool:
        """Whether a kernel that ran has several configurations."""
        return self.machine is not None and any(
            len(t) > 1 for t in self.machine.choices.seen.values()
        )

    def words(self) -> list[str]:
        """Return how the kernel was run."""
        if not self.compiled or self.machine is None:
            return [f"on {self.device}, by the function as it is"]
        names = ", ".join(f"{n} ({count:,} launches)" for n, count in self.machine.kernels.items())
        found = [
            f"Triton kernels compiled for {self.target}, in the PTX machine, without a GPU: {names}"
        ]
        for name, texts in self.machine.choices.seen.items():
            used = self.machine.choices.chosen.get(name, texts[0])
            found.append(
                f"{name} is autotuned ({len(texts)} configurations); claims are judged with {used}"
            )
        found += self.notes
        if self.machine.approximate:
            opcodes = ", ".join(sorted(self.machine.approximate))
            found.append(
                f"each GPU has its own approximation of {opcodes}; the machine has numpy's"
            )
        if self.ignored:
            found.append(f"{INTERPRET} is set and was not used")
        return found


@contextmanager
def running_kernels(device: str, target: str) -> Iterator[KernelRun]:
    """Decide how kernels run while the context is open; no environment variable decides it.

    Raises:
        ArgumentError: If Triton's interpreter is already loaded.
    """
    interpreted = os.environ.get(INTERPRET)
    if interpreted is not None and "triton" in sys.modules:
        raise ArgumentError(
            expected="Triton as a compiler",
            received=f"{INTERPRET}={interpreted}, with which Triton was imported",
            remedy=f"unset {INTERPRET}",
        )
    os.environ.pop(INTERPRET, None)
    run = KernelRun(device, target, ignored=interpreted is not None)
    try:
        with run.opened:
            yield run
    finally:
        if interpreted is not None:
            os.environ[INTERPRET] = interpreted


def fault_of_kernel(error: IsobitError) -> str:
    """Return what the PTX machine found wrong with a kernel; empty if the error says something else."""
    if "isobit.certifying.running.refusals" not in sys.modules:
        return ""
    from isobit.certifying.running.user_kernels import FAULTS

    return in_one_line(error) if isinstance(error, FAULTS) else ""
