"""Targets for `isobit.reveal` that write their terms into a recorded call and read elements of its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.orders.probed_call import (
    Addend,
    Axis,
    CallTarget,
    FoundSum,
    Index,
    ProbedCall,
    choose_axes,
    count_places,
    place_of,
    read_places,
    view_of,
)
from isobit.errors import RevealError
from isobit.reveal import targets
from isobit.reveal.target import Terms, divided
from isobit.reveal.targets.tensor_target import BITS, SCALES, TensorTarget

ROUNDED = 2.0**-8  # relative: a 16-bit quotient is rounded by less


class _RoundedTarget(TensorTarget):
    """A sum that a factor or a division has rounded before it is read: probes have whole numbers of units."""

    def sums(self, batch: Sequence[Terms]) -> list[float]:
        """Return the sum of each probe, rounded to whole units."""
        unit = self.scale.unit
        return [
            round(value / unit) * unit if math.isfinite(value) else value
            for value in super().sums(batch)
        ]


def target_of_sum(call: ProbedCall, found: FoundSum, *, with_addend: bool = False) -> CallTarget:
    """Return the target of a sum whose terms were found.

    Args:
        call: the call.
        found: its terms, as `SumFinder.find` returned them; the other inputs are as it left them.
        with_addend: make the entry of `found.addend` the last term; then products are not probed, as it is none.

    Returns:
        The target; it reads as many elements of each call as there are places.

    Raises:
        RevealError: The terms have a dtype, or indices, that cannot be probed.
    """
    carrier, out = call.writable(found.carrier), call.run()[found.output]
    check_dtype(call, carrier)
    axes = choose_axes(found, carrier, out)
    if with_addend and found.addend is not None:
        axes = [axis for axis in axes if axis.along in found.addend.places.values()]
        write, terms = _place_with_addend(call, found, found.addend, axes)
    else:
        write, terms = _place_terms(carrier, found, axes)
    inverse = _invert(found.gain, found.n)
    exact = abs(math.frexp(inverse)[0]) == 0.5

    def run() -> Tensor:
        write()
        sums = read_places(call.run()[found.output], found.element, axes)
        return sums if inverse == 1.0 else sums.double() * inverse

    factors = None
    if found.factor is not None and not with_addend:
        at, dim = found.factor
        factors = call.writable(at).movedim(dim, -1)
    target = (TensorTarget if exact else _RoundedTarget)(
        name_of(call, found.element),
        terms,
        run,
        "sum" if factors is None else "product",
        factors,
        output_bits=BITS[out.dtype],
        place=place_of(axes),
        scope=_scope_of(call, found, with_addend),
        storage="at the addresses of the recorded tensors, modulo a cache line",
    )
    if inverse != 1.0:
        target.scale = divided(target.scale)
        if not exact or terms.dtype == torch.float16:
            target.output_bits = 0  # what is read is not the rounded sum alone
    if not exact:  # a count of c units is read with an error of c / 2^bits at most
        readable = 1 << (BITS[out.dtype] - 2)
        target.scale = replace(target.scale, absorbed=min(target.scale.absorbed, readable))
    return CallTarget(target, found.element, tuple(axes))


def check_dtype(call: ProbedCall, carrier: Tensor) -> None:
    """Raise RevealError if terms of the carrier's dtype cannot be probed."""
    if carrier.dtype not in SCALES:
        raise RevealError(
            expected="terms of fp32, bf16 or fp16",
            received=f"{carrier.dtype} in {call.name}",
            remedy="the order of sums of this dtype is not revealed",
        )


def name_of(call: ProbedCall, element: Index) -> str:
    """Return the name of a target: the operator, the shapes and the element."""
    shapes = " × ".join(str(list(call.flat[at].shape)) for at in call.inputs)
    return f"{call.name} {shapes}, element {list(element)}"


def _scope_of(call: ProbedCall, found: FoundSum, with_addend: bool) -> str:
    what = f"element {list(found.element)}, terms in {call.name_of(found.carrier) or 'an input'}"
    if with_addend and found.addend is not None:
        return f"{what}, the last one in {call.name_of(found.addend.at)}, other inputs constant"
    alone = found.factor is not None or len(call.inputs) == 1
    return what if alone else f"{what}, other inputs constant"


def _invert(gain: float, n: int) -> float:
    """Return 1 / gain; exactly n if the gain may be a rounded division by the number of terms."""
    inverse = 1.0 / gain
    return float(n) if abs(inverse - n) < ROUNDED * n else inverse


def _place_terms(
    carrier: Tensor, found: FoundSum, axes: Sequence[Axis]
) -> tuple[Callable[[], None], Tensor]:
    """Return a function that writes the terms to the carrier, and the terms, [places, n].

    They are a view of the carrier if there is one and it is on the CPU; else a matrix that is copied to it.
    """
    if carrier.device.type == "cpu" and all(isinstance(m, range) for m in found.members.values()):
        try:
            return (lambda: None), _carrier_view(carrier, found, axes).view(
                count_places(axes), found.n
            )
        except RuntimeError:  # strides that no matrix has
            pass
    terms = torch.zeros(count_places(axes), found.n, dtype=carrier.dtype)
    return _writer(carrier, found, axes, terms), terms


def _place_with_addend(
    call: ProbedCall, found: FoundSum, addend: Addend, axes: Sequence[Axis]
) -> tuple[Callable[[], None], Tensor]:
    """Return the same with the addend as one more term: a matrix that is copied to both inputs."""
    carrier, added = call.writable(found.carrier), call.writable(addend.at)
    terms = torch.zeros(count_places(axes), found.n + 1, dtype=carrier.dtype)
    write = _writer(carrier, found, axes, terms[:, :-1])
    dims = {along: dim for dim, along in addend.places.items()}
    ranges = {}
    for axis in axes:
        offset = addend.entry[dims[axis.along]] - found.element[axis.along]
        ranges[dims[axis.along]] = range(axis.elements.start + offset, axis.elements.stop + offset)
    view = view_of(added, addend.entry, ranges, [dims[axis.along] for axis in axes])
    last = terms[:, -1].view([len(axis.entries) for axis in axes])

    def write_both() -> None:
        write()
        view.copy_(last)

    return write_both, terms


def _carrier_view(carrier: Tensor, found: FoundSum, axes: Sequence[Axis]) -> Tensor:
    """Return the entries of all places, [*places, *members]; of irregular members the whole dimension."""
    ranges = {axis.dim: axis.entries for axis in axes}
    for dim, indices in found.members.items():
        ranges[dim] = indices if isinstance(indices, range) else range(carrier.shape[dim])
    order = [*(axis.dim for axis in axes), *sorted(found.members)]
    return view_of(carrier, found.first, ranges, order)


def _writer(
    carrier: Tensor, found: FoundSum, axes: Sequence[Axis], terms: Tensor
) -> Callable[[], None]:
    """Return a function that copies a matrix of terms, [places, n], to the carrier."""
    members = sorted(found.members)
    view = _carrier_view(carrier, found, axes)
    sizes = [len(found.members[dim]) for dim in members]
    shaped = terms.view([len(axis.entries) for axis in axes] + sizes)
    irregular = [dim for dim in members if not isinstance(found.members[dim], range)]
    if not irregular:
        return lambda: _copy(view, shaped)
    if len(irregular) > 1:
        raise RevealError(
            expected="terms at irregular indices of at most one dimension",
            received=f"{len(irregular)} such dimensions",
            remedy="the order of this sum is not revealed",
        )
    chosen = torch.tensor(found.members[irregular[0]], device=carrier.device)
    along = len(axes) + members.index(irregular[0])
    return lambda: _copy_at(view, along, chosen, shaped)


def _copy(view: Tensor, terms: Tensor) -> None:
    view.copy_(terms)


def _copy_at(view: Tensor, dim: int, chosen: Tensor, terms: Tensor) -> None:
    view.index_copy_(dim, chosen, terms.to(view.device))


# Targets for the sums inside functions of rows, in a recorded call: a softmax's denominator, a norm's squares.

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
