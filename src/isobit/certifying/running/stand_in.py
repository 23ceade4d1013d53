"""A stand-in for the GPU that wrapper code asks about, so that modules written for a GPU run as they are.

[Note: the stand-in]
Wrappers ask torch.cuda how many multiprocessors there are, check that tensors are on the GPU, and make tensors on it.
While a function runs (and while its module is imported), these questions are answered as the target would answer them,
and tensors are made on the CPU instead. Nothing else of CUDA is there: streams, events and memory do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

FunctionMode: Any = TorchFunctionMode  # untyped in torch

# Multiprocessors of the largest card of each target, from NVIDIA's architecture white papers: A100, RTX 3090, Orin,
# RTX 4090, H100 SXM, B200, RTX 5090.
MULTIPROCESSORS = {
    "sm_80": 108,
    "sm_86": 82,
    "sm_87": 16,
    "sm_89": 128,
    "sm_90": 132,
    "sm_100": 148,
    "sm_120": 170,
}
IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
REGISTERS = 65_536  # of a multiprocessor, on all of them


def is_gpu(value: Any) -> bool:
    """Tell whether a value names a GPU as a device."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class OnTheCPU(FunctionMode):  # type: ignore[misc]
    """Makes tensors on the CPU where a GPU is named, and says of each that it is on a GPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with the CPU for the GPU."""
        if func == IS_CUDA:
            return True
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        given = {name: CPU if is_gpu(value) else value for name, value in (kwargs or {}).items()}
        return func(*(CPU if is_gpu(value) else value for value in args), **given)


CPU = torch.device("cpu")


class NoDevice:
    """Stands in for `torch.cuda.device` and `torch.cuda.stream`: a context that does nothing."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.idx = 0

    def __enter__(self) -> NoDevice:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def properties_of(target: str) -> Any:
    """Return what a wrapper may ask about the card of a target."""
    number = int(target.removeprefix("sm_"))
    return SimpleNamespace(
        name=f"{target}, not there",
        major=number // 10,
        minor=number % 10,
        multi_processor_count=MULTIPROCESSORS[target],
        total_memory=80 << 30,
        warp_size=32,
        max_threads_per_multi_processor=1536 if target in ("sm_86", "sm_89", "sm_120") else 2048,
        regs_per_multiprocessor=REGISTERS,
        gcnArchName="",
    )


@contextmanager
def standing_in(target: str) -> Iterator[None]:
    """Answer questions to torch.cuda as a card of the target would, and make tensors on the CPU."""
    card = properties_of(target)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None, device=CPU)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *given, **named: True,
        "get_device_properties": lambda device=None: card,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_device_name": lambda device=None: card.name,
        "current_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
        "device": NoDevice,
        "device_of": NoDevice,
        "stream": NoDevice,
    }
    raw = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0)
    gpu = torch.device("cuda", 0)
    accelerator = mock.patch.multiple(
        torch.accelerator,
        is_available=lambda: True,
        current_accelerator=lambda check_available=False: gpu,
    )
    with mock.patch.multiple(torch.cuda, **answers), raw, accelerator, OnTheCPU():
        yield
