"""The kinds of devices that a world can serve, and what torch lacks of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.simulator import rank as ranks

# Each kind with the words of a script that ask for it; the first that is found is served.
KINDS = {
    "cuda": re.compile(
        rb"cuda|\bnccl\b|torch\.accelerator|\b(accelerate|transformers|trl|lightning)\b"
    ),
    "xpu": re.compile(rb"xpu|\bxccl\b"),
    "npu": re.compile(rb"\bnpu\b|torch_npu|\bhccl\b"),
}


def kind_in(source: bytes) -> str:
    """Return the kind of device that a script asks for, or nothing."""
    return next((kind for kind, words in KINDS.items() if words.search(source)), "")


def _to_npu(self: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    """Copy a tensor to an NPU, the current one if none is named."""
    return self.to(torch.device("npu", ranks.current().device) if device is None else device)


def _module_to_npu(self: nn.Module, device: Any = None) -> nn.Module:
    """Copy the tensors of a module to an NPU."""
    module: Any = self
    module._apply(lambda tensor: _to_npu(tensor, device))
    return self


def name_npu() -> ModuleType:
    """Name torch's free kind of device "npu", once in a process, and return its module, which has no devices yet."""
    if getattr(torch, "npu", None) is not None:
        module: ModuleType = torch.npu  # type: ignore[attr-defined]
        return module
    try:
        naming: Any = torch.utils
        naming.rename_privateuse1_backend("npu")
    except RuntimeError as error:
        raise UnsupportedError(
            expected="a process in which no other device has the name that npu needs",
            received=str(error),
            remedy="simulate the script in a process of its own: isobit simulate",
        ) from error
    accelerators: Any = torch._C._acc

    class NoDevices(accelerators.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return False

        def is_built(self) -> bool:
            return False

        def has_primary_context(self, index: int) -> bool:
            return False

    accelerators.register_python_privateuseone_hook(NoDevices())
    module = ModuleType("torch.npu")
    vars(module).update(
        is_available=lambda: False,
        device_count=lambda: 0,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
    )
    vars(torch)["npu"] = module
    return module


@contextmanager
def npu_in_torch(functions: dict[str, Any]) -> Iterator[None]:
    """Give torch what the package torch_npu does: `torch.npu`, and methods of tensors and modules.

    A process can name this kind of device only once: afterwards the name remains, and `torch.npu` has no devices.
    """
    module = name_npu()
    plain = dict(vars(module))
    owners: list[tuple[Any, str, Any]] = [
        (Tensor, "npu", _to_npu),
        (Tensor, "is_npu", property(lambda self: self.device.type == "npu")),
        (nn.Module, "npu", _module_to_npu),
    ]
    with ExitStack() as stack:
        vars(module).update(functions)
        stack.callback(vars(module).update, plain)
        stack.callback(vars(module).clear)
        for owner, name, value in owners:
            setattr(owner, name, value)
            stack.callback(delattr, owner, name)
        for name, value in (("torch.npu", module), ("torch_npu", ModuleType("torch_npu"))):
            if name not in sys.modules:
                sys.modules[name] = value
                stack.callback(sys.modules.pop, name, None)
        yield
