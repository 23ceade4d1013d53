"""The devices that `isobit doctor` and `isobit gate model` take by name.

A card, or a GPU whose compiled code is run on this CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from isobit.certifying.running.card import ptxas_version
from isobit.certifying.running.compile import TARGETS, triton_package
from isobit.contracts.language.grammar import suggest
from isobit.errors import ArgumentError, EngineError


@dataclass(frozen=True)
class Device:
    """Where a command runs.

    Attributes:
        name: As the user wrote it.
        place: The torch device of tensors.
        target: The GPU that kernels are compiled for.
        is_virtual: Whether code of that GPU is run on this CPU.
        facts: What it is, for a record.
    """

    name: str
    place: torch.device
    target: str
    is_virtual: bool
    facts: dict[str, Any] = field(default_factory=dict)


def find_device(name: str) -> Device:
    """Return a device by name.

    Raises:
        ArgumentError: If the name is neither a target nor a CUDA device.
        EngineError: If there is no such device, or Triton is not installed.
    """
    triton = str(triton_package().__version__)
    if name in TARGETS:
        facts = {
            "name": name,
            "how": "compiled code, run in the PTX machine on this CPU",
            "target": name,
            "triton": triton,
            "ptxas": ptxas_version(name),
        }
        return Device(name, torch.device("cpu"), name, True, facts)
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise ArgumentError(
            expected=f"--device cuda, cuda:N, or a target of {', '.join(TARGETS)}",
            received=name,
            remedy=suggest(name, ["cuda", *TARGETS]),
        )
    if not torch.cuda.is_available() or int(number or 0) >= torch.cuda.device_count():
        raise EngineError(
            expected=f"the device {name}",
            received=f"{torch.cuda.device_count()} CUDA devices in torch {torch.__version__}",
            remedy="--device sm_90 compiles for a card and runs the code on this CPU",
        )
    return card(name, torch.device("cuda", int(number or 0)), triton)


def card(name: str, place: torch.device, triton: str) -> Device:
    """Return a card, with what is known of its driver."""
    from isobit.ops.gpu.launching import target_of  # needs Triton

    properties: Any = torch.cuda.get_device_properties(place)
    target = target_of(torch.empty(0, device=place))
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    facts = {
        "name": properties.name,
        "how": "run on the card",
        "target": target,
        "triton": triton,
        "ptxas": ptxas_version(target),
        "capability": f"{properties.major}.{properties.minor}",
        "runtime": runtime,
        "driver": driver_version(),
    }
    return Device(name, place, target, False, {key: value for key, value in facts.items() if value})


def driver_version() -> str:
    """Return the newest CUDA that the driver supports, such as "12.8"; "" if it does not say."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    if ask is None:
        return ""
    version = int(ask())
    return f"{version // 1000}.{version % 1000 // 10}"
