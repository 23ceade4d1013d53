"""Tell another rounding from an error for whole modules: both results against the module in fp64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from isobit.auditing.judging.accuracy import APPROXIMATION, without_reference
from isobit.auditing.records import ERROR, ORDER, RANDOM, Accuracy
from isobit.auditing.replay.call import tensors_of
from isobit.auditing.replay.module_hooks import Called

# A module rounds many times, and fused code fewer times, so that one result may be closer to fp64 than the other. How
# often one may be farther than the other, or than one rounding of its row's largest number, and be another rounding:
FARTHER = 16.0


def explain(call: Called, compiled: Any) -> tuple[str, Accuracy]:
    """Return whether two results of a module differ by rounding, by an error, or at random; and both errors.

    Args:
        call: The eager call.
        compiled: What the compiled module returned.
    """
    if call.draws:
        return RANDOM, Accuracy("none")
    pairs = [
        (a, b)
        for a, b in zip(tensors_of(call.out), tensors_of(compiled), strict=False)
        if a.shape == b.shape and a.is_floating_point()
    ]
    if not pairs:
        return ERROR, Accuracy("none")
    try:
        wide = [t for t in tensors_of(in_double(call)) if t.is_floating_point()]
    except Exception:  # a module may raise anything in fp64
        wide = []
    if [t.shape for t in wide] != [a.shape for a, _ in pairs]:
        judged = [without_reference(a, b) for a, b in pairs]
        errors = [accuracy for kind, accuracy in judged if kind == ERROR]
        if not errors:
            return ORDER, Accuracy("none")
        return ERROR, Accuracy("none", approximation=all(one.approximation for one in errors))
    far = [
        max(distance(pair[side], exact) for pair, exact in zip(pairs, wide, strict=True))
        for side in (0, 1)
    ]
    allowed = FARTHER * max(min(far), 1.0)
    shown = [error / allowed for error in far]
    if max(shown) <= 1:
        return ORDER, Accuracy("fp64", shown[0], shown[1])
    finest = min(torch.finfo(a.dtype).eps for a, _ in pairs)
    explained = max(far) * finest <= APPROXIMATION
    return ERROR, Accuracy("fp64", shown[0], shown[1], approximation=explained)


def in_double(call: Called) -> Any:
    """Return the result of the module in fp64."""
    module = copy.deepcopy(call.module).double()

    def widen(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if floating else value

    args, kwargs = _pytree.tree_map(widen, (call.args, call.kwargs))
    return module(*args, **kwargs)


def distance(value: Tensor, exact: Tensor) -> float:
    """Return the largest distance in roundings of the row's largest number; infinite where only one is finite."""
    if not value.numel():
        return 0.0
    top = exact.abs().amax(-1, keepdim=True) if exact.dim() else exact.abs()
    step = torch.finfo(value.dtype).eps * top.clamp(min=torch.finfo(value.dtype).tiny)
    given = value.double()
    same = (given == exact) | (given.isnan() & exact.isnan())
    ratio = ((given - exact).abs() / step).nan_to_num(nan=float("inf"))
    return float(torch.where(same, 0.0, ratio).max())
