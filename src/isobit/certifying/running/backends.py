"""Run the Triton executors of isobit's operators without a GPU: in the interpreter, or compiled, in the PTX machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.running.compile import (
    Compiled,
    Compiler,
    KernelText,
    Specialised,
    check_target,
    specialise,
)
from isobit.certifying.running.interpreter import interpreted
from isobit.errors import ArgumentError, UnsupportedError
from isobit.foundation import backends
from isobit.foundation.machine import keeping_subnormals
from isobit.order.engines import ENGINE_OF_TARGET

KINDS = ("interpreter", "machine")
_compiling = threading.Lock()


@cache
def compiler_for(target: str) -> Compiler:
    """Return the compiler of a target, which keeps what it has compiled."""
    return Compiler(target, resources=False)


def compile_once(target: str, kernel: Any, call: Specialised) -> Compiled:
    """Return a compiled kernel; one thread compiles at a time."""
    with _compiling:
        return compiler_for(target).compile(kernel, call)


@dataclass(frozen=True)
class InterpreterBackend:
    """Runs kernels in Triton's interpreter with the arithmetic of a target; it says nothing about compiled code."""

    target: str

    @property
    def kind(self) -> str:
        """Its name for `executing`."""
        return "interpreter"

    @property
    def engine(self) -> str:
        """The arithmetic of the target's matrix products."""
        return ENGINE_OF_TARGET[self.target]

    @keeping_subnormals
    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Run one kernel."""
        check_memory(kernel, args)
        with interpreted(self.engine):
            kernel[grid](*args, **constants, **options)


@dataclass(frozen=True)
class MachineBackend:
    """Compiles kernels for a target and runs the PTX, in bits.

    With `check`, values also carry the names of their expressions, so that branches and addresses that depend on data
    are refused, and accesses of memory are checked for races. `texts` receives each kernel that ran. `prepare` may
    change a call before it is compiled, such as by making constants of its sizes.
    """

    target: str
    check: bool = False
    texts: list[KernelText] | None = field(default=None, compare=False)
    prepare: Callable[[Specialised], Specialised] | None = None

    @property
    def kind(self) -> str:
        """Its name for `executing`."""
        return "machine"

    @property
    def engine(self) -> str:
        """The arithmetic of the target's matrix products."""
        return ENGINE_OF_TARGET[self.target]

    @keeping_subnormals
    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Compile and run one kernel."""
        check_memory(kernel, args)
        if not hasattr(kernel, "params"):
            raise UnsupportedError(
                expected="kernels that Triton compiles",
                received=f"{kernel.__name__}, which TRITON_INTERPRET has replaced by Python",
                remedy='unset TRITON_INTERPRET, or use executing("interpreter")',
            )
        call = specialise(kernel, self.target, args, {**constants, **options})
        call = call if self.prepare is None else self.prepare(call)
        compiled = compile_once(self.target, kernel, call)
        buffers: dict[int, Buffer] = {}
        given: list[Buffer | int | float] = []
        for value in call.arguments:
            if isinstance(value, torch.Tensor):
                value = buffers.setdefault(value.data_ptr(), Buffer(memory_of(value)))
            given.append(value)
        machine = Machine(compiled.program, self.engine, names=self.check, races=self.check)
        machine.run(grid, given, shared_bytes=compiled.shared_bytes)
        if self.texts is not None:
            facts = compiled.facts
            self.texts.append(KernelText(facts.kernel, facts.options, facts.digest, facts.digest))


@contextmanager
def executing(
    kind: Literal["interpreter", "machine"], *, target: str = "sm_90", check: bool = False
) -> Iterator[backends.Backend]:
    """Run isobit's operators by their Triton executors while the context is open, on CPU tensors.

    Args:
        kind: "interpreter" for Triton's interpreter, or "machine" to compile for the target and run the PTX.
        target: The GPU: "sm_80" (A100), "sm_90" (H100), "sm_100" (B200) or another one that `certify` knows.
        check: Also refuse races, and branches that depend on data; for "machine" only, and slower.

    Returns:
        A context manager for this thread. An operator without a Triton executor raises UnsupportedError in it.

    Raises:
        ArgumentError: If the kind or the target is not known.
        EngineError: If Triton is not installed.

    Example:
        >>> x, weight = torch.randn(4, 64), torch.ones(64)
        >>> with isobit.certifying.executing("machine", target="sm_90"):
        ...     y = isobit.rms_norm(x, weight)
        >>> torch.equal(y, isobit.rms_norm(x, weight))
        True
    """
    if kind not in KINDS or (check and kind != "machine"):
        raise ArgumentError(
            expected=f"a kind of {', '.join(KINDS)}, and check=True only for the machine",
            received=f"{kind!r}, check={check}",
            remedy='pass "machine" to run compiled code',
        )
    check_target(target)
    backend = InterpreterBackend(target) if kind == "interpreter" else MachineBackend(target, check)
    with backends.use(backend):
        yield backend


def memory_of(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor as numpy has it; 16-bit floats are uint16."""
    plain = tensor.detach()
    if plain.dtype in (torch.bfloat16, torch.float16):
        return plain.view(torch.int16).numpy().view(np.uint16)
    return plain.numpy()


def check_memory(kernel: Any, args: Sequence[Any]) -> None:
    """Raise unless all tensors are contiguous and on the CPU."""
    for value in args:
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type != "cpu" or not value.is_contiguous():
            layout = "contiguous" if value.is_contiguous() else "not contiguous"
            raise UnsupportedError(
                expected="contiguous tensors on the CPU",
                received=f"a tensor {list(value.shape)} on {value.device}, {layout}, for {kernel.__name__}",
                remedy="use isobit.certifying.executing with tensors on the CPU",
            )
