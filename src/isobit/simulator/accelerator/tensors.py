"""The mode that serves devices: see [Note: served devices]."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from isobit.simulator import rank as ranks
from isobit.simulator.call_sites import user_stack
from isobit.simulator.program.process_state import replaced
from isobit.simulator.rank import Rank
from isobit.simulator.torch.backward_pass import lasting

# Untyped in torch.
FunctionMode: Any = TorchFunctionMode
DispatchMode: Any = TorchDispatchMode


def served_index(device: Any, rank: Rank) -> int | None:
    """Return the number of a served device, or None for another device.

    Raises:
        RuntimeError: As a GPU's driver does, if there are fewer devices than that.
    """
    kind = rank.accelerator
    if isinstance(device, str) and device.startswith(kind):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != kind:
            return None
        index = rank.device if device.index is None else device.index
    elif isinstance(device, int) and not isinstance(device, bool):
        index = device
    else:
        return None
    if not 0 <= index < rank.world_size:
        raise RuntimeError(
            f"{kind.upper()} error: invalid device ordinal {index}: there are {rank.world_size} devices"
        )
    return index


class ServedDevices(FunctionMode):  # type: ignore[misc]
    """Carry out calls on the CPU and keep the device of every tensor.

    Attributes:
        marks: The device of each tensor that is not on the CPU, as the program sees it.
    """

    def __init__(self, rank: Rank) -> None:
        """Serve the devices of a rank."""
        super().__init__()
        self.rank = rank
        if rank.device_marks is None:
            rank.device_marks = WeakTensorKeyDictionary()
        self.marks: Any = rank.device_marks
        self.special = special_calls(rank.accelerator)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the device of a call, and mark its results."""
        kwargs = dict(kwargs or {})
        special = self.special.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        kwargs.pop("pin_memory", None) if kwargs.get("pin_memory") else None
        index, placed = None, False
        if kwargs.get("device") is not None:
            index, placed = served_index(kwargs["device"], self.rank), True
            if index is not None:
                kwargs["device"] = torch.device("cpu")
        elif any(isinstance(argument, torch.device) for argument in args):
            found = [a for a in args if isinstance(a, torch.device)]
            index, placed = served_index(found[0], self.rank), True
            args = [torch.device("cpu") if isinstance(a, torch.device) else a for a in args]
        result = func(*args, **kwargs)
        if not placed:
            index = self.mark_among([*args, *kwargs.values()])
        self.mark(result, index)
        return result

    def mark_of(self, tensor: Any) -> int | None:
        """Return the device of a tensor; None is the CPU."""
        found: int | None = self.marks.get(tensor) if isinstance(tensor, Tensor) else None
        return found

    def mark_among(self, values: Iterable[Any]) -> int | None:
        """Return the device of the first tensor that is on one."""
        for value in values:
            inner = value if isinstance(value, (list, tuple)) else (value,)
            for item in inner:
                index = self.mark_of(item)
                if index is not None:
                    return index
        return None

    def mark(self, result: Any, index: int | None) -> None:
        """Note the device of results."""
        if index is None:
            return
        if isinstance(result, Tensor):
            self.place(result, index)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self.mark(item, index)

    def move(self, tensor: Tensor, index: int | None, copy: Callable[[], Tensor]) -> Tensor:
        """Return a tensor on another device: itself if it is there, else a copy."""
        result = copy()
        if result is tensor and self.mark_of(tensor) != index:
            result = tensor.clone()
        if index is None:
            self.marks.pop(result, None)
        else:
            self.place(result, index)
        return result

    def place(self, tensor: Tensor, index: int) -> None:
        """Note the device of a tensor, and where the rank first used that device."""
        self.marks[tensor] = index
        if index not in self.rank.devices_used:
            self.rank.devices_used[index] = user_stack(sys._getframe())


def _to_served(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> Any:
    """Serve `tensor.cuda(device)` and `tensor.xpu(device)`."""
    device = args[1] if len(args) > 1 else kwargs.get("device")
    index = mode.rank.device if device is None else served_index(device, mode.rank)
    form = kwargs.get("memory_format", torch.preserve_format)
    tensor = args[0]
    return mode.move(tensor, index, lambda: tensor.to(memory_format=form))


def _to_cpu(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> Any:
    return mode.move(args[0], None, lambda: func(*args, **kwargs))


def _to(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> Any:
    """Serve `tensor.to(device, dtype)`, `tensor.to(dtype)` and `tensor.to(other)`."""
    tensor, rest = args[0], list(args[1:])
    index = mode.mark_of(tensor)
    if rest and isinstance(rest[0], Tensor):
        index = mode.mark_of(rest[0])
    else:
        place = kwargs.get("device", rest[0] if rest else None)
        if isinstance(place, (str, torch.device, int)):
            index = served_index(place, mode.rank)
            if "device" in kwargs:
                kwargs["device"] = torch.device("cpu") if index is not None else place
            else:
                rest[0] = torch.device("cpu") if index is not None else place
    return mode.move(tensor, index, lambda: func(tensor, *rest, **kwargs))


def _device(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> Any:
    index = mode.mark_of(args[0])
    return func(*args, **kwargs) if index is None else torch.device(mode.rank.accelerator, index)


def _is_served(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> bool:
    return mode.mark_of(args[0]) is not None


def _index(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> int:
    index = mode.mark_of(args[0])
    return -1 if index is None else index


def _itself(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _set_data(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> None:
    func(*args, **kwargs)
    index = mode.mark_of(args[1])
    if index is None:
        mode.marks.pop(args[0], None)
    else:
        mode.place(args[0], index)


def _type(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> Any:
    """Serve `x.type()` and `x.type("torch.cuda.FloatTensor")`."""
    here, wanted = f"torch.{mode.rank.accelerator}.", [*args[1:], *kwargs.values()][:1]
    if not wanted or wanted[0] is None:
        name = func(args[0])
        return name if mode.mark_of(args[0]) is None else name.replace("torch.", here)
    if isinstance(wanted[0], str):
        index = mode.rank.device if wanted[0].startswith(here) else None
        plain = wanted[0].replace(here, "torch.")
        return mode.move(args[0], index, lambda: func(args[0], plain))
    return mode.move(args[0], mode.mark_of(args[0]), lambda: func(*args, **kwargs))


def _name_device(mode: ServedDevices, func: Any, args: Any, kwargs: Any) -> Any:
    """Serve `torch.device(3)`, and the same in the arguments of `module.to(3)`."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (torch.device(mode.rank.accelerator, args[0]), *args[1:])
    return func(*args, **kwargs)


class ServedFactories(DispatchMode):  # type: ignore[misc]
    """Carry out on the CPU what hooks of a backward pass ask for: torch switches the other mode off there."""

    def __init__(self, rank: Rank) -> None:
        """Serve the devices of a rank."""
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the device of an operator."""
        kwargs = kwargs or {}
        if served_index(kwargs.get("device"), self.rank) is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


Special = Callable[[ServedDevices, Any, Any, Any], Any]
_tensor: Any = Tensor  # its properties have getters that the stubs lack
ALWAYS: dict[Any, Special] = {
    _tensor.cpu: _to_cpu,
    _tensor.to: _to,
    _tensor.type: _type,
    torch.device: _name_device,
    torch._C._nn._parse_to: _name_device,
    _tensor.device.__get__: _device,
    _tensor.get_device: _index,
    torch.get_device: _index,
    _tensor.pin_memory: _itself,
    _tensor.data.__set__: _set_data,
}


def special_calls(kind: str) -> dict[Any, Special]:
    """Return the calls that are not carried out as they are. Of "npu" torch has no methods: see `modules.py`."""
    own: dict[Any, Special] = {}
    if kind in ("cuda", "xpu"):
        own = {
            getattr(_tensor, kind): _to_served,
            getattr(_tensor, f"is_{kind}").__get__: _is_served,
        }
    return ALWAYS | own


def forget_devices() -> None:
    """Clear torch's cache of fake tensors: it remembers the current device of the rank before."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None:
        fake.FakeTensorMode.cache_clear()


@contextmanager
def serving_devices(rank: Rank) -> Iterator[None]:
    """Serve the devices of a rank on the current thread, if its world has any."""
    if not rank.accelerator:
        yield
        return
    with ServedFactories(rank), lasting(ServedDevices(rank)):
        yield


# Files of tensors on served devices: `torch.save` records the device, and `torch.load` puts the tensor back on it.
#
# As on a GPU, a file that rank 0 wrote names `cuda:0`, so that a rank which loads it without `map_location` uses the
# device of rank 0.

registry: Any = torch.serialization
FIRST = 0  # before the CPU's own entry, which has priority 10


def tag(storage: Any) -> str | None:
    """Return the device of a storage that is being saved, or None for torch to decide."""
    rank = ranks.owner()
    index = None if rank is None else rank.stored_devices.get(storage._cdata)
    return None if rank is None or index is None else f"{rank.accelerator}:{index}"


def restore(storage: Any, location: str) -> Any:
    """Note the device of a storage that is being loaded; None for torch to decide."""
    rank = ranks.owner()
    index = None if rank is None else served_index(location, rank)
    if rank is None or index is None:
        return None
    rank.stored_devices[storage._cdata] = index
    return storage


def clean(function: Callable[..., Any], after: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a function of torch after which, on a rank, the notes are used and forgotten."""

    def call(*args: Any, **options: Any) -> Any:
        if not ranks.inside():
            return function(*args, **options)
        rank = ranks.current()
        rank.stored_devices.clear()
        try:
            result = function(*args, **options)
            after(result)
            return result
        finally:
            rank.stored_devices.clear()

    return call


def put_back(loaded: Any) -> None:
    """Give loaded tensors the devices that were noted."""
    rank = ranks.current()
    for leaf in tree_leaves(loaded):
        parts = [*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf]
        for part in parts:
            if isinstance(part, Tensor) and part.layout is torch.strided:
                index = rank.stored_devices.get(part.untyped_storage()._cdata)
                if index is not None:
                    rank.device_marks[part] = index
                    rank.devices_used.setdefault(index, [])


def reduce_of(plain: Any) -> Any:
    """Return a `Tensor.__reduce_ex__` that notes the device of what is pickled; torch has no mode for it."""

    def __reduce_ex__(self: Tensor, protocol: Any) -> Any:
        rank = ranks.owner()
        index = None if rank is None or rank.device_marks is None else rank.device_marks.get(self)
        if rank is not None and index is not None:
            rank.stored_devices[self.untyped_storage()._cdata] = index
        return plain(self, protocol)

    return __reduce_ex__


@contextmanager
def devices_in_files() -> Iterator[None]:
    """Make `torch.save` and `torch.load` keep served devices."""
    entry = (FIRST, tag, restore)
    registry._package_registry.insert(0, entry)
    try:
        with (
            replaced(Tensor, "__reduce_ex__", reduce_of(vars(Tensor)["__reduce_ex__"])),
            replaced(torch, "save", clean(torch.save, lambda result: None)),
            replaced(torch, "load", clean(torch.load, put_back)),
        ):
            yield
    finally:
        registry._package_registry.remove(entry)
