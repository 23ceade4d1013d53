"""Read a loss of the program's own from its graph: which elements it adds up, and what it divides them by.

[Note: a loss without a name]
`backward` is called on a scalar. From there the graph leads through additions, and products with numbers that need no
gradient, to the nodes that reduced many elements to one: means and sums. The gradient that arrives at such a node is
the factor of its sum, as at the result of a loss function of torch. How many elements count is the size of the input,
or the number of ones in the mask that the input was multiplied with. Whatever else is on the way makes the loss one
that is not known: it is then not judged, and the reason names the operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

LINEAR = ("Add", "Sub", "Neg", "ToCopy", "Alias", "Squeeze", "Unsqueeze", "View", "Clone")
SCALED = ("Mul", "Div")  # by what needs no gradient
SIGNATURE = 32  # operators below a reduction that two micro-batches of one loss must share
MOST_NODES = 4096


@dataclass(frozen=True)
class Reduction:
    """A mean or sum over all elements of a tensor, in a graph.

    Attributes:
        node: Its node.
        kind: What two micro-batches of one loss have in common: operators, shapes of one row, and parameters.
        count: The elements that count.
        divisor: What the node itself divides by: the elements of a mean, 1 of a sum.
    """

    node: Any
    kind: str
    count: float
    divisor: float


class UnknownLoss(Exception):
    """A graph that is not understood, with the reason."""


def operator_of(node: Any) -> str:
    """Return the name of a node's operator: `Mean` of MeanBackward0."""
    name: str = node.name()
    return name.removeprefix("torch::autograd::").partition("Backward")[0]


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes of the inputs that need a gradient."""
    return [each for each, _ in node.next_functions if each is not None]


def reductions_of(root: Tensor) -> list[Reduction]:
    """Return the reductions whose weighted sum a scalar is.

    Args:
        root: What `backward` was called on.

    Raises:
        UnknownLoss: If the graph has anything else.
    """
    found: list[Reduction] = []
    waiting: list[Any] = [root.grad_fn]
    seen = 0
    while waiting:
        node, seen = waiting.pop(), seen + 1
        if node is None or seen > MOST_NODES:
            raise UnknownLoss("the loss is a parameter, or a sum of very many")
        operator, inputs = operator_of(node), inputs_of(node)
        if operator in ("Mean", "Sum"):
            if not reduces_all(node):
                raise UnknownLoss("the loss is a mean or sum over some dimensions only")
            is_one = math.prod(sizes_of(node)) == 1
            waiting += inputs if is_one else []
            found += [] if is_one else [reduction_at(node, operator)]
        elif operator in LINEAR or (operator in SCALED and len(inputs) == 1):
            waiting += inputs
        else:
            raise UnknownLoss(f"the loss is computed by {operator}, whose targets are not known")
    return found


def reduces_all(node: Any) -> bool:
    """Return whether a mean or sum leaves one element."""
    sizes, dims = sizes_of(node), getattr(node, "_saved_dim", None)
    if not dims or not sizes:
        return True
    # Dimensions are kept without a sign: the last one may be 2**64 - 1.
    reduced = {(d - 2**64 if d >= 2**63 else d) % len(sizes) for d in dims}
    return all(size == 1 for at, size in enumerate(sizes) if at not in reduced)


def reduction_at(node: Any, operator: str) -> Reduction:
    """Return the reduction of a node."""
    sizes = tuple(node._saved_self_sym_sizes)
    numel = math.prod(sizes)
    count: float = numel
    for below in inputs_of(node):
        mask = mask_of(below)
        if mask is not None:
            count = float(mask.expand(sizes).sum())
    names, parameters = signature_of(node)
    kind = f"{operator.lower()} of {list(sizes[1:])}: {' '.join(names)}; {sorted(parameters)}"
    return Reduction(node, kind, count, float(numel) if operator == "Mean" else 1.0)


def sizes_of(node: Any) -> Sequence[int]:
    """Return the sizes of what a mean or sum reduces."""
    sizes: Sequence[int] = node._saved_self_sym_sizes
    return sizes


def mask_of(node: Any) -> Tensor | None:
    """Return which elements a node keeps, if it multiplies them by ones and zeros or fills them.

    Raises:
        UnknownLoss: If it weights them otherwise.
    """
    operator, given = operator_of(node), [each for each, _ in node.next_functions]
    if operator == "MaskedFill":
        filled: Tensor = node._saved_mask
        return ~filled
    if operator == "Where" and given.count(None) == 1:
        kept: Tensor = node._saved_condition
        return kept if given[1] is None else ~kept
    if operator != "Mul" or given.count(None) != 1:
        return None
    factor = node._saved_other if given[1] is None else node._saved_self
    if not isinstance(factor, Tensor) or factor.numel() == 1:
        return None
    if not bool(((factor == 0) | (factor == 1)).all()):
        raise UnknownLoss("elements of the loss are multiplied by weights")
    return factor.bool()


def signature_of(node: Any) -> tuple[list[str], set[int]]:
    """Return the operators below a node, the nearest first, and the ids of the parameters that it reaches."""
    names: list[str] = []
    parameters: set[int] = set()
    seen, waiting = {node}, [node]
    for at in waiting:
        names += [operator_of(at)] if len(names) < SIGNATURE else []
        if hasattr(at, "variable"):
            parameters.add(id(at.variable))
        for below in inputs_of(at):
            if below not in seen and len(seen) < MOST_NODES:
                seen.add(below)
                waiting.append(below)
    return names, parameters
