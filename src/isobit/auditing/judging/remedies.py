"""What to use in the place of a guilty operator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.records import ERROR, RANDOM
from isobit.auditing.replay.call import Call, operator_name
from isobit.ops.gelu.op import gelu
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.linear.op import linear
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.silu.op import silu
from isobit.ops.softmax.op import softmax

NAMES_OF_OURS = {
    "aten::mm": "isobit.linear",
    "aten::addmm": "isobit.linear",
    "aten::linear": "isobit.linear",
    "aten::bmm": "isobit.attention, or isobit.linear per product",
    "aten::_softmax": "isobit.softmax",
    "aten::_log_softmax": "isobit.log_softmax",
    "aten::native_layer_norm": "isobit.layer_norm",
    "aten::silu": "isobit.silu",
    "aten::gelu": "isobit.gelu",
    "aten::mean": "isobit.rms_norm or isobit.layer_norm, if it is part of a norm",
    "aten::sum": "isobit.exact_sum, or the operator that it is part of",
    "aten::embedding_dense_backward": "isobit.embedding",
}


def remedy_for(operator: str, kind: str) -> str:
    """Return what a person can do about a guilty operator."""
    if kind == RANDOM:
        return "call model.eval(), or key its random numbers by sample and position"
    ours = NAMES_OF_OURS.get(operator)
    if ours is None and "scaled_dot_product" in operator:
        ours = "isobit.attention"
    if kind == ERROR:
        fix = "one of its two results is less accurate than rounding explains: look at the kernel and at what it reads"
        return f"{fix}; {ours} computes it right" if ours else fix
    if ours is None:
        return "call it one sample at a time, or write it over a fixed order of addition"
    return f"{ours}; isobit.enable(model) replaces it in supported models"


# isobit's operator in the place of one of torch's: for its error, and for its price.

ROUNDS = 7


def of_mm(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    """Return isobit.linear for a product of two matrices."""
    weight = right.t().contiguous()
    return lambda: linear(left, weight)


def of_addmm(
    bias: Tensor, left: Tensor, right: Tensor, **named: Any
) -> Callable[[], Tensor] | None:
    """Return isobit.linear with a bias."""
    if bias.dim() != 1 or named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
        return None
    weight = right.t().contiguous()
    return lambda: linear(left, weight, bias)


def of_rows(function: Callable[[Tensor], Tensor]) -> Callable[..., Callable[[], Tensor] | None]:
    """Return an operator over the last dimension."""

    def make(x: Tensor, dim: int, wider: bool = False) -> Callable[[], Tensor] | None:
        return None if wider or dim % x.dim() != x.dim() - 1 else lambda: function(x)

    return make


def of_layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Callable[[], Tensor] | None:
    """Return isobit.layer_norm over the last dimension."""
    if len(shape) != 1 or weight is None:
        return None
    return lambda: layer_norm(x, weight, bias, eps)


CALLS_OF_OURS: dict[str, Callable[..., Callable[[], Tensor] | None]] = {
    "aten::mm": of_mm,
    "aten::addmm": of_addmm,
    "aten::_softmax": of_rows(softmax),
    "aten::_log_softmax": of_rows(log_softmax),
    "aten::native_layer_norm": of_layer_norm,
    "aten::silu": lambda x: lambda: silu(x),
    "aten::gelu": lambda x, approximate="none": lambda: gelu(x, approximate=approximate),
}


def ours_for(call: Call) -> Callable[[], Tensor] | None:
    """Return a call of isobit's operator that computes the same, or None."""
    make = CALLS_OF_OURS.get(operator_name(call.func))
    try:
        made = make(*call.args, **call.kwargs) if make is not None else None
        if made is not None:
            made()
    except Exception:  # isobit's operator does not take this dtype, device or shape
        return None
    return made


def price_of(call: Call) -> float | None:
    """Return the time of isobit's operator over the time of torch's; both run by turns, medians are compared."""
    ours = ours_for(call)
    if ours is None:
        return None
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for run, kept in zip((call.run, ours), times, strict=True):
            began = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            kept.append(time.perf_counter() - began)
    return statistics.median(times[1]) / max(statistics.median(times[0]), 1e-9)
