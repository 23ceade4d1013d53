"""Compile a Triton kernel for a GPU that is not there, specialised as Triton would specialise it on that GPU."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from isobit.certifying.judging.static_facts import facts_of
from isobit.certifying.machine.predicates import launch_comparisons
from isobit.certifying.ptx.parser import parse
from isobit.certifying.ptx.program import Program
from isobit.certifying.records import KernelFacts
from isobit.certifying.running.stand_in import REGISTERS, properties_of
from isobit.errors import ArgumentError, EngineError, IsobitError, UnsupportedError
from isobit.order.engines import ENGINE_OF_TARGET

# Shared memory that one program may have, in bytes: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_LIMIT = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_87": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}
TARGETS = tuple(name for name in ENGINE_OF_TARGET if name.startswith("sm_"))
# Targets that kernels can be compiled for and not run: nothing here executes AMD's machine code. Threads of a warp.
AMD_TARGETS = {"gfx942": 64, "gfx950": 64, "gfx1100": 32}


class CompileError(IsobitError, RuntimeError):
    """A kernel that Triton does not compile for a target."""


class LaunchError(IsobitError, RuntimeError):
    """A compiled kernel that the GPU would not launch, such as one that needs too much shared memory."""


def identity(value: Any) -> Any:
    """Return what tells a kernel or a function of one from others: its source and what that refers to."""
    try:
        return getattr(value, "cache_key", value)
    except Exception:  # compiling it says what is wrong
        return value


@dataclass(frozen=True)
class Specialised:
    """One call of a kernel, as Triton would compile it: its arguments, types, constants and options."""

    bound: dict[str, Any]
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two compiled kernels the same."""
        constants = {path: identity(value) for path, value in self.constants.items()}
        parts = (self.signature, constants, self.attributes, self.options)
        return tuple(repr(part) for part in parts)

    @property
    def arguments(self) -> list[Any]:
        """The arguments that the compiled kernel takes: those that are no constants, in their order."""
        return [self.bound[n] for n in self.names]

    @property
    def names(self) -> list[str]:
        """The names of `arguments`."""
        return [n for n, kind in self.signature.items() if kind != "constexpr"]

    def describe(self) -> str:
        """Return constants and options that a reader knows: "BLOCK_M=16 num_warps=4"."""
        names = list(self.signature)
        shown = [f"{names[path[0]]}={value}" for path, value in self.constants.items()]
        options = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")
        defaults = {"num_ctas": 1, "enable_fp_fusion": True}
        for name in options:
            value = getattr(self.options, name)
            if value != defaults.get(name, object()):
                shown.append(f"{name}={value}")
        return " ".join(shown)


@dataclass(frozen=True)
class Compiled:
    """A kernel as PTX, parsed, with its static facts."""

    name: str
    ptx: str
    program: Program
    shared_bytes: int
    facts: KernelFacts
    comparisons: tuple[int, ...] = ()  # instructions; see [Note: thresholds inside kernels]


def triton_package() -> Any:
    """Import triton, or raise an error that says how to install it."""
    try:
        import triton
    except ImportError as error:
        raise EngineError(
            expected="the package triton, which compiles the kernel",
            received=str(error),
            remedy="pip install triton (Linux); no GPU is needed",
        ) from error
    return triton


def check_target(target: str) -> str:
    """Return a target, or raise an error with the known ones."""
    if target not in TARGETS:
        raise ArgumentError(
            expected=f"a target of {', '.join(TARGETS)}",
            received=target,
            remedy="name one of these; sm_80 is A100, sm_90 H100 and H200, sm_100 B200",
        )
    return target


def gpu_target(target: str) -> Any:
    """Return Triton's record of a target."""
    triton_package()
    from triton.backends.compiler import GPUTarget

    if target in AMD_TARGETS:
        return GPUTarget("hip", target, AMD_TARGETS[target])
    return GPUTarget("cuda", int(check_target(target).removeprefix("sm_")), 32)


class AbsentDriver:
    """Stands in for Triton's driver while a function runs: the target's name, and the CPU for its tensors."""

    def __init__(self, target: str) -> None:
        self.target, self.name = gpu_target(check_target(target)), target

    def get_current_target(self) -> Any:
        """Return the GPU that is compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Return the device where tensors are: the CPU."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return what Triton asks about the device: torch.cuda, for which stand_in.py answers."""
        import torch

        return torch.cuda

    @property
    def utils(self) -> Any:
        """What Triton's tutorials ask the driver about the device."""
        found = {
            "multiprocessor_count": properties_of(self.name).multi_processor_count,
            "max_num_regs": REGISTERS,
            "max_shared_mem": SHARED_LIMIT[self.name],
            "warpSize": 32,
        }
        return SimpleNamespace(get_device_properties=lambda device: found)


@contextmanager
def absent_driver(target: str) -> Iterator[None]:
    """Let wrapper code ask Triton which GPU it runs on."""
    triton_package()
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(AbsentDriver(target))
    try:
        yield
    finally:
        driver._active = before


def specialise(
    kernel: Any, target: str, arguments: Sequence[Any], named: Mapping[str, Any]
) -> Specialised:
    """Bind a call's arguments and specialise it, with Triton's own rules: constants, 1, None and multiples of 16."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(gpu_target(target))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": bool(kernel.debug), "instrumentation_mode": "", **named}
    try:
        bound, specialisation, options = binder(*arguments, **given)
        options, signature, constants, attributes = kernel._pack_args(
            backend, given, bound, specialisation, options
        )
    except (TypeError, KeyError) as error:
        raise ArgumentError(
            expected=f"the arguments of {kernel.__name__}",
            received=str(error),
            remedy="call the kernel with its own parameters and Triton's options",
        ) from error
    for name, kind in signature.items():
        if not isinstance(kind, str) or kind.startswith("tensordesc"):
            raise UnsupportedError(
                expected="pointers, numbers and constants as arguments of a kernel",
                received=f"{name} of {kernel.__name__}: {kind}",
                remedy="pass tensors and make descriptors or tuples inside the kernel",
            )
    return Specialised(bound, signature, constants, attributes, options)


@dataclass
class Compiler:
    """Compiles each specialised kernel once per target."""

    target: str
    resources: bool = True
    done: dict[tuple[Any, ...], Compiled] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda text: None

    def compile(self, kernel: Any, call: Specialised) -> Compiled:
        """Return the compiled kernel of a call.

        Raises:
            CompileError: If Triton does not compile it.
            LaunchError: If it needs more shared memory than the GPU has.
        """
        key = (identity(kernel), *call.key)
        if key not in self.done:
            self.progress(f"compiling {kernel.__name__} for {self.target}")
            self.done[key] = self._compile(kernel, call)
        return self.done[key]

    def _compile(self, kernel: Any, call: Specialised) -> Compiled:
        from triton.compiler import compile as triton_compile

        try:
            made = triton_compile(
                source_of(kernel, call),
                target=gpu_target(check_target(self.target)),
                options=call.options.__dict__,
            )
        except Exception as error:
            last = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
            raise CompileError(
                expected=f"{kernel.__name__} to compile for {self.target}",
                received=f"{type(error).__name__}: {last[-1].strip()}",
                remedy="mend the kernel, or leave this configuration out",
            ) from error
        shared, limit = int(made.metadata.shared), SHARED_LIMIT[self.target]
        if shared > limit:
            raise LaunchError(
                expected=f"at most {limit} bytes of shared memory on {self.target}",
                received=f"{shared} bytes in {kernel.__name__} ({call.describe()})",
                remedy="make the tile smaller or use fewer stages",
            )
        ptx = made.asm["ptx"]
        facts = facts_of(
            ptx,
            kernel=kernel.__name__,
            target=self.target,
            options=call.describe(),
            shared_bytes=shared,
            fusion_allowed=bool(call.options.enable_fp_fusion),
            cubin=made.asm.get("cubin") if self.resources else None,
        )
        program = parse(ptx)
        found = tuple(launch_comparisons(program))
        return Compiled(kernel.__name__, ptx, program, shared, facts, found)


def source_of(kernel: Any, call: Specialised) -> Any:
    """Return what Triton compiles, known to its cache by the file's path too.

    Triton's cache does not look at paths: a copy of a file would get the PTX of the first one, whose lines point into
    a folder that may be gone.
    """
    from triton.compiler import ASTSource

    source = ASTSource(kernel, call.signature, call.constants, call.attributes)
    named = f"{source.hash()} {kernel.fn.__code__.co_filename}"
    digest = hashlib.sha256(named.encode()).hexdigest()
    source.hash = lambda: digest
    return source


def python_line(source: tuple[str, int] | None) -> str:
    """Return the text of a Python line, or "" if it cannot be read."""
    if source is None or not source[1]:
        return ""
    import linecache

    return re.sub(r"\s+", " ", linecache.getline(*source)).strip()


# The texts of compiled kernels: what a GPU runs, and what the PTX machine runs for that GPU.


@dataclass(frozen=True)
class KernelText:
    """One compiled kernel.

    Attributes:
        kernel: Its name.
        options: Constants and options that it was compiled with.
        digest: BLAKE3 of the text that ran, without comments and debug lines.
        in_machine: The same of the text that the PTX machine runs for this target; "" if it runs none.
        sass: The digest of the machine code that ran; "" if it is not known.
        recorded_sass: The digest of the machine code that isobit's records have for this text; "" if they have none.
    """

    kernel: str
    options: str
    digest: str
    in_machine: str
    sass: str = ""
    recorded_sass: str = ""

    @property
    def same(self) -> bool:
        """Whether what is known of the machine's text holds for the text that ran."""
        return self.digest == self.in_machine


def distinct(texts: Iterable[KernelText]) -> list[KernelText]:
    """Return each text once, sorted by kernel and options."""
    return sorted(set(texts), key=lambda text: (text.kernel, text.options, text.digest))
