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
    "cuda": re.compile(rb"cuda|\bnccl\b|torch\.accelerator|\b(accelerate|transformers|trl)\b"),
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
    return self._apply(lambda tensor: _to_npu(tensor, device))


@contextmanager
def npu_in_torch() -> Iterator[ModuleType]:
    """Give torch what the package torch_npu does: the device's name, `torch.npu` and methods of tensors and modules.

    A process can name torch's free kind of device only once, so the name remains after the run.
    """
    try:
        torch.utils.rename_privateuse1_backend("npu")
    except RuntimeError as error:
        raise UnsupportedError(
            expected="a process in which no other device has the name that npu needs",
            received=str(error),
            remedy="simulate the script in a process of its own: isobit simulate",
        ) from error
    module = ModuleType("torch.npu")
    owners: list[tuple[Any, str, Any]] = [
        (torch, "npu", module),
        (Tensor, "npu", _to_npu),
        (Tensor, "is_npu", property(lambda self: self.device.type == "npu")),
        (nn.Module, "npu", _module_to_npu),
    ]
    with ExitStack() as stack:
        for owner, name, value in owners:
            setattr(owner, name, value)
            stack.callback(delattr, owner, name)
        for name, value in (("torch.npu", module), ("torch_npu", ModuleType("torch_npu"))):
            if name not in sys.modules:
                sys.modules[name] = value
                stack.callback(sys.modules.pop, name, None)
        yield module
