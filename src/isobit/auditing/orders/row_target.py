"""Targets for the sums inside functions of rows, in a recorded call: a softmax's denominator, a norm's squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from isobit.auditing.orders.call_target import check_dtype, name_of
from isobit.auditing.orders.found_sum import FoundSum, Index
from isobit.auditing.orders.probed_call import ProbedCall
from isobit.auditing.orders.probed_places import (
    Axis,
    CallTarget,
    choose_axes,
    count_places,
    place_of,
    view_of,
)
from isobit.reveal import targets
from isobit.reveal.targets.tensor_target import TensorTarget

LARGE = 16.0
BALANCING = 10  # elements that the target of a layer norm uses to keep the mean at zero


def target_of_rows(call: ProbedCall, carrier: int, element: Index) -> CallTarget | None:
    """Return the sum inside a function of rows as a target: of exponentials, squares or centred squares.

    Args:
        call: the call.
        carrier: the flat position of the input; the first result has its shape.
        element: the element whose row is probed.

    Returns:
        The target; None if no element of the first result depends on several of the input.

    Raises:
        RevealError: The input has a dtype that cannot be probed.
    """
    tensor = call.writable(carrier)
    for at in call.inputs:
        call.fill(at, 0.0 if at == carrier or "bias" in call.name_of(at) else 1.0)
    outs = call.run()
    if not outs or outs[0].shape != tensor.shape or not element:
        return None
    dims = _dims_of_row(call, tensor, element)
    if not dims:
        return None
    check_dtype(call, tensor)
    members: dict[int, Sequence[int]] = {dim: range(tensor.shape[dim]) for dim in dims}
    places = {dim: dim for dim in range(tensor.dim()) if dim not in dims and tensor.shape[dim] > 1}
    found = FoundSum(carrier, 0, element, element, members, places, True, 1.0)
    axes = choose_axes(found, tensor, tensor)
    target = _choose(call, tensor, found, axes)
    target.name, target.place = name_of(call, element), place_of(axes)
    return CallTarget(target, element, tuple(axes))


def _dims_of_row(call: ProbedCall, tensor: Tensor, element: Index) -> list[int]:
    """Return the dimensions along which other entries change the element."""
    tensor[element].fill_(1.0)
    before = float(call.run()[0][element])
    dims = []
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            step = 1 if element[dim] + 1 < size else -1
            beside = (*element[:dim], element[dim] + step, *element[dim + 1 :])
            other = tensor[beside]
            other.fill_(LARGE)  # a 16-bit logarithm of many exponentials shows it
            if float(call.run()[0][element]) != before:
                dims.append(dim)
            other.zero_()
    tensor[element].zero_()
    return dims


def _choose(
    call: ProbedCall, tensor: Tensor, found: FoundSum, axes: Sequence[Axis]
) -> TensorTarget:
    """Choose by what the function makes of zeros (a softmax: not zero) and of equal numbers (a centred norm: zero)."""
    ranges = {axis.dim: axis.entries for axis in axes}
    ranges |= {dim: range(tensor.shape[dim]) for dim in found.members}
    order = [*(axis.dim for axis in axes), *sorted(found.members)]

    def apply(x: Tensor, *_: Any) -> Tensor:
        view = view_of(tensor, found.element, ranges, order)
        view.copy_(x.view(view.shape))
        out = view_of(call.run()[0], found.element, ranges, order)
        return out.reshape(x.shape).cpu()

    def read(value: float) -> float:
        tensor.fill_(value)
        read = float(call.run()[0][found.element])
        tensor.zero_()
        return read

    apply.__name__ = call.name
    m, dtype = count_places(axes), tensor.dtype
    if math.isfinite(at_zero := read(0.0)) and at_zero != 0:
        target, what = targets.softmax(found.n, m, dtype, apply), "the exponentials"
    elif math.isclose(read(1.0), 0.0, abs_tol=2.0**-8) and found.n > BALANCING + 1:
        target = targets.layer_norm(found.n - BALANCING, m, dtype, apply)
        what = f"the squares of all but the last {BALANCING} elements"
    else:
        target, what = targets.rms_norm(found.n, m, dtype, apply), "the squares"
    target.scope = f"the sum of {what} in the row of element {list(found.element)}"
    return target
