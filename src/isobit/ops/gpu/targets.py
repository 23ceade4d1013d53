"""Which GPU a device is, and the arithmetic of its matrix products; without Triton."""

from __future__ import annotations

from typing import Any

import torch

from isobit.order.engines import ENGINE_OF_TARGET


def target_of_device(device: torch.device) -> str:
    """Return the name that Triton compiles for, such as "sm_90" or "gfx942"."""
    if torch.version.hip:
        properties: Any = torch.cuda.get_device_properties(device)
        return str(properties.gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def engine_on_gpu(dtype: torch.dtype, device: torch.device) -> str:
    """Return the engine of products of a dtype on a GPU; one that is not known has the GPU's name."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "chain"
    target = target_of_device(device)
    return ENGINE_OF_TARGET.get(target, f"that of {target}")
