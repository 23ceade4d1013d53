"""What to use in the place of a guilty operator."""

from __future__ import annotations

from isobit.auditing.records import ERROR, RANDOM

OURS = {
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
    ours = OURS.get(operator)
    if ours is None and "scaled_dot_product" in operator:
        ours = "isobit.attention"
    if kind == ERROR:
        fix = "one of its two results is less accurate than rounding explains: look at the kernel and at what it reads"
        return f"{fix}; {ours} computes it right" if ours else fix
    if ours is None:
        return "call it one sample at a time, or write it over a fixed order of addition"
    return f"{ours}; isobit.enable(model) replaces it in supported models"
