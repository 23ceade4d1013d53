"""What differs between two results of one operator: elements, units in the last place, first bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.records import Accuracy, FirstDifference, Place
from isobit.auditing.replay.call import TensorSpec
from isobit.bits import as_integers


@dataclass(frozen=True)
class Comparison:
    """Two results of one operator, compared bit for bit."""

    elements: int
    of: int
    ulps: int | None
    largest: float
    first: FirstDifference | None


@dataclass(eq=False)
class Finding:
    """A guilty call: what differed, and what is needed to call it again with tensors of the same kind.

    Attributes:
        unread: whether nothing reads the results that differ.
    """

    place: Place
    comparison: Comparison
    kind: str
    accuracy: Accuracy
    func: Any
    run: list[Any | TensorSpec]
    variant: list[Any | TensorSpec]
    spec: Any
    unread: bool = False


def compare(run: Tensor, variant: Tensor) -> Comparison:
    """Compare two tensors of one dtype and shape."""
    a, b = as_integers(run), as_integers(variant)
    if torch.equal(a, b):
        return Comparison(0, a.numel(), 0, 0.0, None)
    wrong = (a != b).reshape(-1)
    count = int(wrong.sum())
    if not run.is_floating_point():
        return Comparison(
            count, a.numel(), None, float((run.double() - variant.double()).abs().max()), None
        )
    where = wrong.nonzero().flatten()
    x, y = run.reshape(-1)[where].double(), variant.reshape(-1)[where].double()
    finite = bool(torch.isfinite(x).all() and torch.isfinite(y).all())
    one, other = ranks(a.reshape(-1)[where]), ranks(b.reshape(-1)[where])
    far = float((one.double() - other.double()).abs().max())
    ulps = int((one - other).abs().max()) if far < 2.0**62 else int(far)  # or int64 would overflow
    largest = float((x - y).abs().nan_to_num(nan=float("inf")).max())
    return Comparison(
        count,
        a.numel(),
        ulps if finite else None,
        largest,
        first_of(run, variant, where),
    )


def first_of(run: Tensor, variant: Tensor, where: Tensor) -> FirstDifference:
    """Describe the first element that differs."""
    at = int(where[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), run.shape))
    size = run.element_size()

    def bits(tensor: Tensor) -> str:
        value = int(as_integers(tensor[index].reshape(1))[0]) & ((1 << 8 * size) - 1)
        return f"0x{value:0{2 * size}x}"

    return FirstDifference(
        index, float(run[index]), float(variant[index]), bits(run), bits(variant)
    )


def ranks(bits: Tensor) -> Tensor:
    """Return the position of each number among all numbers of its dtype, from its bits."""
    wide = bits.to(torch.int64)
    lowest = -(1 << (8 * bits.element_size() - 1))
    return torch.where(wide < 0, lowest - wide, wide)


def merge(one: Comparison | None, other: Comparison) -> Comparison:
    """Return both comparisons as one."""
    if one is None:
        return other
    ulps = None if one.ulps is None or other.ulps is None else max(one.ulps, other.ulps)
    return replace(
        one,
        elements=one.elements + other.elements,
        of=one.of + other.of,
        ulps=ulps,
        largest=max(one.largest, other.largest),
        first=one.first or other.first,
    )
