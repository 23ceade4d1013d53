"""Reveal the arithmetic of a GPU's matrix products by isobit's own kernels, and compare it with the defined one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from isobit.order.engines import ENGINE_OF_TARGET
from isobit.reveal.tensor_core import EXTENT, FoundLeaf, Row, reveal_tensor_core

OPERANDS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def reveal_leaf(dtype: torch.dtype, device: torch.device) -> FoundLeaf:
    """Find how products of 16-bit operands are added on a device, or on the chosen backend."""
    multiply = import_module("isobit.ops.linear.triton").multiply
    ones = torch.ones(1, EXTENT, dtype=dtype, device=device)

    def sums(rows: Sequence[Row]) -> list[float]:
        terms = torch.tensor(rows, dtype=torch.float64).to(dtype).to(device)
        found: list[float] = multiply(terms, ones, None, torch.float32)[:, 0].tolist()
        return found

    return reveal_tensor_core(sums, OPERANDS[dtype])


def expected_engine(target: str) -> str:
    """Return the engine that is defined for a target; "" if none is."""
    return ENGINE_OF_TARGET.get(target, "")
