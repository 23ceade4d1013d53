"""Attest the Triton executors on the GPU that is there: each operator before its first use, bit for bit.

[Note: what a GPU is held to]
Row and element operators, and all products in fp32, must have the bits of the portable executor on the CPU. Products of
16-bit operands must have those of the tensor-core engine that isobit.order.engines defines for the GPU, in every form
that a model runs; see [Note: the forms of a product] in shipped_forms.py. For a GPU without a defined engine, it is
revealed first; one that agrees with no engine, or with several, is refused. An operator that differs is refused at
every call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module

import torch

from isobit.errors import EngineError, in_one_line
from isobit.foundation.machine import run_apart
from isobit.foundation.records import Attestation
from isobit.ops.attesting import calls_on
from isobit.ops.dispatch import constant_in_graphs, find_attestation
from isobit.ops.gpu import executors
from isobit.order.engines import ENGINE_OF_TARGET
from isobit.reveal.tensor_core import EXTENT, FoundLeaf, Row, reveal_tensor_core

# Reveal the arithmetic of a GPU's matrix products by isobit's own kernels, and compare it with the defined one.

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


PRODUCTS = ("linear", "attention", "logprob", "distillation")

_lock = threading.RLock()
_found: dict[tuple[str, torch.dtype, torch.device], Attestation] = {}


@constant_in_graphs
def require(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Attest an operator on a device, once per process; return True.

    Raises:
        EngineError: If it is not attested; at every call.
    """
    operator = executors.folder_of(name)
    key = (operator, dtype, device)
    found = _found.get(key)  # at every call: torch's question for a GPU takes longer
    if found is None:
        if not torch.cuda.is_available():
            return True  # fake tensors: nothing is computed
        with _lock:
            if key not in _found:
                refuse_capture(operator, dtype, device)
                _found[key] = run_apart(lambda: attest_operator(operator, dtype, device))
            found = _found[key]
    if not found.kept:
        raise EngineError(
            expected=f"the Triton executor of {operator} in {dtype} to keep the order on {device}",
            received=found.detail,
            remedy=f"run `isobit doctor --device {device.type} --record FILE` and report it; the CPU serves meanwhile",
        )
    return True


def refuse_capture(operator: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise while a CUDA graph is captured: attestation synchronizes, and its launches would be part of the graph."""
    if torch.cuda.is_current_stream_capturing():
        raise EngineError(
            expected=f"{operator} in {dtype} to be attested on {device} before a CUDA graph is captured",
            received="its first call, inside a capture",
            remedy="call it once before, as for every warm-up; `isobit doctor --device cuda` shows what is attested",
        )


def attest_operator(operator: str, dtype: torch.dtype, device: torch.device) -> Attestation:
    """Compare an operator on a device, or on the chosen backend where the device is the CPU, with its definition."""
    from isobit.ops.gpu.launching import target_of  # needs Triton

    name, engine = str(dtype).removeprefix("torch."), "chain"
    target = target_of(torch.empty(0, device=device))
    if operator in PRODUCTS and dtype != torch.float32:
        engine = ENGINE_OF_TARGET.get(target, "")
    try:
        if not engine:
            leaf = reveal_leaf(dtype, device)
            if len(leaf.engines) != 1:
                detail = f"the arithmetic of matrix products on {target} is not known: {leaf}"
                return Attestation(name, "unknown", False, 0, detail)
            engine = leaf.engines[0]  # which every form is compared with below
        found, checks = compare(operator, dtype, device, engine)
    except EngineError:
        raise
    except Exception as error:
        return Attestation(name, engine, False, 0, f"{operator}: {in_one_line(error)}")
    detail = f"{found} differs from its definition" if found else operator
    return Attestation(name, engine, found is None, checks, detail)


def compare(
    operator: str, dtype: torch.dtype, device: torch.device, engine: str
) -> tuple[str | None, int]:
    """Return what differs first, or None, and the number of operators that were compared."""
    import_module(executors.home_of(operator))
    for name in executors.names_of(operator):
        executors.prepare(name, dtype)
    call = calls_on(device)
    forms = import_module(
        "isobit.ops.gpu.shipped_forms"
    )  # needs no Triton, and much time to import
    if operator == "linear":
        return forms.linear_difference(dtype, call, device, engine), 1
    if operator in forms.OF_HALVES and dtype != torch.float32:
        return forms.OF_HALVES[operator](dtype, call, engine), 1
    attest = find_attestation(operator)
    difference = getattr(attest, "difference_on_gpu", None) or attest.difference
    return difference(dtype, call), 1
