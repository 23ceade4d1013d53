"""Functions of `torch.cuda`, `torch.xpu`, `torch.npu` and `torch.accelerator` for the devices that a world serves."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.data import dataloader
from torch.utils.data._utils import pin_memory

from isobit.errors import UnsupportedError
from isobit.simulator import rank as ranks
from isobit.simulator.accelerator.modules import npu_in_torch
from isobit.simulator.accelerator.tensors import devices_in_files, served_index
from isobit.simulator.program.process_state import replaced
from isobit.simulator.rank import current

# Streams and events of served devices. Calls are carried out in their order, so that nothing has to wait.


class ServedEvent:
    """An event: it has happened once it was recorded, at the virtual time of its rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Accept what torch.cuda.Event accepts."""
        self.at: int | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self.at = current().clock

    def wait(self, stream: Any = None) -> None:
        """Do nothing: what was called before has been carried out."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, end: ServedEvent) -> float:
        """Return the virtual milliseconds between two events."""
        if self.at is None or end.at is None:
            raise ValueError("both events must be recorded before the elapsed time is calculated")
        return (end.at - self.at) / 1e3


class ServedStream:
    """A stream: all streams of a rank are one."""

    cuda_stream = stream_id = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        """Accept what torch.cuda.Stream accepts."""
        self.priority = priority

    @property
    def device(self) -> torch.device:
        """The current device of the rank."""
        return torch.device(current().accelerator, current().device)

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def record_event(self, event: ServedEvent | None = None) -> ServedEvent:
        """Record an event."""
        event = ServedEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> ServedStream:
        """Make it current: nothing changes."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave it."""


# DataLoaders with workers and pinned memory on a served device.
#
# torch pins batches in a thread of its own, which is no thread of the rank, so that it finds no device. Here the rank
# pins each batch when it takes it: the same calls in the same order, without the thread.

WithWorkers: Any = dataloader._MultiProcessingDataLoaderIter
pin: Any = pin_memory.pin_memory  # untyped in torch


def without_thread(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of iterators that start no thread to pin memory, if they have workers."""

    def construct(self: Any, loader: Any) -> None:
        plain(self, loader)
        if ranks.inside() and isinstance(self, WithWorkers):
            self.pinned_by_rank, self._pin_memory = self._pin_memory, False

    return construct


def pinned(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the next batch, and pins it."""

    def next_data(self: Any) -> Any:
        data = plain(self)
        return pin(data) if getattr(self, "pinned_by_rank", False) else data

    return next_data


@contextmanager
def pinned_by_ranks() -> Iterator[None]:
    """Let ranks pin the batches of their workers."""
    iterator: Any = dataloader._BaseDataLoaderIter
    with (
        replaced(iterator, "__init__", without_thread(vars(iterator)["__init__"])),
        replaced(WithWorkers, "_next_data", pinned(vars(WithWorkers)["_next_data"])),
    ):
        yield


MEMORY = 80 << 30  # bytes of a served device
NAME = "isobit simulated device"


def set_device(device: Any) -> None:
    """Choose the current device of the rank; a negative number changes nothing, as in torch."""
    rank = ranks.current()
    if isinstance(device, int) and device < 0:
        return
    index = served_index(device, rank)
    if index is not None:
        rank.device, rank.device_chosen = index, True


class DeviceContext:
    """`torch.cuda.device`: another current device for a block."""

    def __init__(self, device: Any) -> None:
        """Keep the device."""
        self.device, self.before = device, 0

    def __enter__(self) -> None:
        """Choose the device."""
        self.before = ranks.current().device
        set_device(self.device)

    def __exit__(self, *error: object) -> None:
        """Choose the one before."""
        ranks.current().device = self.before


def device_of(value: Any) -> Any:
    """Choose the device of a tensor for a block."""
    index = value.get_device() if isinstance(value, torch.Tensor) else -1
    return DeviceContext(index)


def properties(device: Any = None) -> SimpleNamespace:
    """Return what programs read of a device."""
    return SimpleNamespace(
        name=NAME, major=8, minor=0, total_memory=MEMORY, multi_processor_count=108, warp_size=32
    )


def seed(value: int) -> None:
    """Seed the random numbers of the rank: served devices draw from its only generator."""
    torch.default_generator.manual_seed(int(value))


def _count() -> int:
    return ranks.current().world_size


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _zero(*args: Any, **options: Any) -> int:
    return 0


def _yes(*args: Any, **options: Any) -> bool:
    return True


def _init() -> None:
    ranks.current().device_chosen = True


def _initialized() -> bool:
    rank = ranks.current()
    return rank.device_chosen or bool(rank.devices_used)


def _stream(*args: Any, **options: Any) -> ServedStream:
    return ServedStream()


def _states(*args: Any) -> list[torch.Tensor]:
    return [torch.default_generator.get_state()] * _count()


def _set_states(states: Any) -> None:
    torch.default_generator.set_state(states[ranks.current().device])


# One table for all kinds of devices: what a kind does not have is left out.
FUNCTIONS: dict[str, Any] = {
    "is_available": _yes,
    "is_initialized": _initialized,  # init_device_mesh chooses a device if not
    "init": _init,
    "_lazy_init": _init,
    "is_bf16_supported": _yes,
    "device_count": _count,
    "current_device": lambda: ranks.current().device,
    "set_device": set_device,
    "device": DeviceContext,
    "device_of": device_of,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_properties": properties,
    "get_arch_list": lambda: ["sm_80"],
    "can_device_access_peer": _yes,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "Stream": ServedStream,
    "Event": ServedEvent,
    "stream": lambda stream=None: nullcontext(stream),
    "set_stream": _nothing,
    "current_stream": _stream,
    "default_stream": _stream,
    "is_current_stream_capturing": lambda: False,
    "manual_seed": seed,
    "manual_seed_all": seed,
    "initial_seed": lambda: torch.default_generator.initial_seed(),
    "get_rng_state": lambda device=None: torch.default_generator.get_state(),
    "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
    "get_rng_state_all": _states,
    "set_rng_state_all": _set_states,
    "seed": lambda: torch.default_generator.seed(),
    "seed_all": lambda: torch.default_generator.seed(),
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "memory_stats": lambda device=None: {},
    "memory_summary": lambda *args, **options: "",
    "set_per_process_memory_fraction": _nothing,
}
for _name in ("allocated", "reserved", "cached"):
    FUNCTIONS |= {f"memory_{_name}": _zero, f"max_memory_{_name}": _zero}
for _name in ("peak_memory_stats", "max_memory_allocated", "max_memory_cached"):
    FUNCTIONS[f"reset_{_name}"] = _nothing
FUNCTIONS["reset_accumulated_memory_stats"] = _nothing

ACCELERATOR: dict[str, Any] = {
    "is_available": _yes,
    "device_count": _count,
    "current_accelerator": lambda check_available=False: torch.device(ranks.current().accelerator),
    "current_device_index": lambda: ranks.current().device,
    "current_device_idx": lambda: ranks.current().device,
    "set_device_index": set_device,
    "set_device_idx": set_device,
    "device_index": DeviceContext,
    "current_stream": _stream,
    "set_stream": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "memory_allocated": _zero,
    "max_memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_reserved": _zero,
    "memory_stats": lambda device=None: {},
    "get_device_capability": lambda device=None: {},
    "empty_host_cache": _nothing,
    "get_memory_info": lambda device=None: (MEMORY, MEMORY),
    "reset_peak_memory_stats": _nothing,
    "reset_accumulated_memory_stats": _nothing,
}
NVTX: dict[str, Any] = {
    "range_push": _zero,
    "range_start": _zero,
    "range_end": _nothing,
    "range_pop": _zero,
    "mark": _nothing,
    "range": lambda *args, **options: nullcontext(),
}
# Functions that need no device, and classes and modules: left as they are.
KEPT = ("jiterator", "check_error", "caching_allocator_disabled", "get_allocator_backend")


def on_rank(plain: Any, served: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that serves ranks, and is torch's own elsewhere."""

    def function(*args: Any, **options: Any) -> Any:
        return served(*args, **options) if ranks.inside() else plain(*args, **options)

    return function


def refused(name: str) -> Callable[..., Any]:
    """Return a function that raises with the name of what is not served."""

    def function(*args: Any, **options: Any) -> Any:
        raise UnsupportedError(
            expected="functions of a device that the simulator serves",
            received=f"{name} on a rank",
            remedy="leave the call out where the program is simulated, or pass --device cpu if it can do without GPUs",
        )

    return function


def autocast_of(plain: Any) -> Callable[..., None]:
    """Return a constructor of `torch.autocast` that serves devices by the CPU's autocast."""

    def construct(
        self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any
    ) -> None:
        if ranks.inside() and device_type == ranks.current().accelerator:
            dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
            device_type = "cpu"
        plain(self, device_type, dtype, *args, **options)

    return construct


def generators() -> type:
    """Return a `torch.Generator` that accepts served devices: it draws on the CPU."""
    plain: Any = torch.Generator

    class Kind(type(plain)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain)

    class Generator(plain, metaclass=Kind):  # type: ignore[misc]
        """A generator of random numbers."""

        def __new__(cls, device: Any = "cpu") -> Any:
            served = ranks.inside() and served_index(device, ranks.current()) is not None
            made = plain.__new__(cls, "cpu" if served else device)
            made.named = torch.device(device) if served else None
            return made

        @property
        def device(self) -> torch.device:
            """The device that the program named."""
            named: torch.device | None = getattr(self, "named", None)
            return torch.device("cpu") if named is None else named

    return Generator


@contextmanager
def recomputed_devices() -> Iterator[None]:
    """Leave devices out of what activation checkpointing compares: tensors that C++ keeps have lost theirs."""
    checks: Any = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    plain = checks["default"]
    checks["default"] = lambda tensor: (tensor.shape, tensor.dtype)
    try:
        yield
    finally:
        checks["default"] = plain


@contextmanager
def without_record_stream() -> Iterator[None]:
    """Make `tensor.record_stream` do nothing: torch would reject a served stream."""
    owner: Any = torch.Tensor
    owner.record_stream = on_rank(owner.record_stream, _nothing)
    try:
        yield
    finally:
        del owner.record_stream  # inherited again


def replace_functions(stack: ExitStack, module: Any, table: dict[str, Any], name: str) -> None:
    """Serve the functions of a module that are in the table, and refuse its others on ranks."""
    for member, served in table.items():
        plain = getattr(module, member, None)
        if plain is None:
            continue
        value = served if isinstance(served, type) else on_rank(plain, served)
        stack.enter_context(replaced(module, member, value))
    for member in module.__all__:
        plain = getattr(module, member)
        if callable(plain) and not isinstance(plain, type) and member not in (*table, *KEPT):
            value = on_rank(plain, refused(f"{name}.{member}"))
            stack.enter_context(replaced(module, member, value))


@contextmanager
def without_triton() -> Iterator[None]:
    """Answer libraries that ask for Triton that it is not there: it compiles for a GPU, which the CPU does not run."""
    plain = importlib.util.find_spec

    @functools.wraps(plain)
    def find(name: str, package: str | None = None) -> Any:
        return None if name == "triton" else plain(name, package)

    importlib.util.find_spec = find
    try:
        yield
    finally:
        importlib.util.find_spec = plain


@contextmanager
def served_functions(kind: str) -> Iterator[None]:
    """Replace the functions while a world that serves devices runs."""
    if not kind:
        yield
        return
    with ExitStack() as stack:
        if kind == "npu":
            stack.enter_context(npu_in_torch(FUNCTIONS))
        else:
            module = getattr(torch, kind)
            for part in (module.random, module.memory, module):
                name = "torch." + part.__name__.split(".")[1]
                replace_functions(stack, part, FUNCTIONS, name)
        replace_functions(stack, torch.accelerator, ACCELERATOR, "torch.accelerator")
        replace_functions(stack, torch.cuda.nvtx, NVTX, "torch.cuda.nvtx")
        autocast = torch.amp.autocast_mode.autocast
        constructor = autocast_of(vars(autocast)["__init__"])
        stack.enter_context(replaced(autocast, "__init__", constructor))
        stack.enter_context(replaced(torch, "Generator", generators()))
        stack.enter_context(recomputed_devices())
        stack.enter_context(without_record_stream())
        stack.enter_context(devices_in_files())
        stack.enter_context(pinned_by_ranks())
        stack.enter_context(without_triton())
        yield
