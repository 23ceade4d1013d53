"""The losses of a program: what each adds up, and the weight that every target has."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Read a loss of the program's own from its graph: which elements it adds up, and what it divides them by.
#
# [Note: a loss without a name]
# `backward` is called on a scalar. From there the graph leads through additions, and products with numbers that need no
# gradient, to the nodes that reduced many elements to one: means and sums. The gradient that arrives at such a node is
# the factor of its sum, as at the result of a loss function of torch. How many elements count is the size of the input,
# or the number of ones in the mask that the input was multiplied with. Whatever else is on the way makes the loss one
# that is not known: it is then not judged, and the reason names the operator.

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


# Record the losses of a program, and the weight that each target has in what is differentiated.
#
# [Note: weights of targets]
# A loss function returns a mean, a sum or one number per target. The gradient that arrives at its result is the factor
# that the program gives it later: 1 / accumulation, a loss scale, a mask. So the weight of a target in the gradient of
# the step is known without knowing how the program computes it: factor / targets of a mean, factor of a sum, and the
# element of the factor otherwise. Micro-batches whose targets have different weights are not parts of one batch.
# A backward that reaches none of torch's loss functions is read from its graph.

BY_CLASS = ("cross_entropy", "nll_loss")  # may ignore targets
BY_ELEMENT = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)
LOSSES = (*BY_CLASS, *BY_ELEMENT)


@dataclass
class LossCall:
    """A call of a loss function in training.

    Attributes:
        kind: The name of the function.
        classes: The number of classes; 0 of a function that compares elements.
        reduction: "mean", "sum" or "none".
        count: The targets that count; with weights of classes, their sum.
        step: The step of the first optimizer.
        dtype: The dtype of the result.
        shapes: Those of the predictions and the targets, of a function that compares them by element.
        has_targets: Whether a target counts; False if all have the index that is ignored.
        is_derived: Whether the loss was read from a graph, in which targets have no names.
        backward: Which backward reached it; None before.
        factor: The gradient of the result.
    """

    kind: str
    classes: int
    reduction: str
    count: float
    step: int
    dtype: torch.dtype
    shapes: tuple[torch.Size, torch.Size] | None
    is_derived: bool = False
    has_targets: bool = True
    backward: int | None = None
    factor: Tensor | None = None

    def take(self, gradient: Tensor) -> None:
        """Keep the gradient of the result."""
        self.backward = torch._C._current_graph_task_id()
        held = gradient.detach().double()
        self.factor = held if self.factor is None else self.factor + held

    def weights(self) -> Tensor:
        """Return the weights of the targets that count; one element if all are equal."""
        assert self.factor is not None
        if self.reduction == "none":
            return self.factor[self.factor != 0].flatten()
        return self.factor.reshape(1) / (self.count if self.reduction == "mean" else 1)


class LossCalls:
    """Losses of a program, recorded while `recording` is open.

    Args:
        is_mine: Whether the current thread is the program's.
        step: The number of the current step.

    Attributes:
        calls: What was differentiated.
        roots: The scalars that `backward` was called on since they were last taken, detached.
        unknown: Why a loss could not be read from its graph; empty if all could.
    """

    def __init__(self, is_mine: Callable[[], bool], step: Callable[[], int]) -> None:
        self.is_mine, self.step = is_mine, step
        self.calls: list[LossCall] = []
        self.roots: list[Tensor] = []
        self.unknown = ""
        self.here = threading.local()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace the loss functions of torch.nn.functional, and `backward`, by ones that also record."""
        with ExitStack() as stack:
            backward = torch.autograd.backward
            torch.autograd.backward = self.followed(backward)
            stack.callback(setattr, torch.autograd, "backward", backward)
            for name in LOSSES:
                plain = getattr(F, name)
                setattr(F, name, self.recorded(name, plain))
                stack.callback(setattr, F, name, plain)
            yield

    def followed(self, plain: Callable[..., None]) -> Callable[..., None]:
        """Return a `torch.autograd.backward` that notes what it was called on."""

        @functools.wraps(plain)
        def call(tensors: Any, *args: Any, **kwargs: Any) -> None:
            root = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
            is_loss = type(root) is Tensor and root.numel() == 1 and root.requires_grad
            if not (is_loss and self.is_mine()):
                return plain(tensors, *args, **kwargs)
            self.roots.append(root.detach())
            derived = self.derive(root)
            plain(tensors, *args, **kwargs)
            reached = {call.backward for call in self.calls}
            # Once a loss function of torch is known to be in it, the graph has nothing to add.
            self.calls += [c for c in derived if c.factor is not None and c.backward not in reached]
            return None

        return call

    def derive(self, root: Tensor) -> list[LossCall]:
        """Return the losses that a scalar is the sum of, which wait for their gradients; none if it is not known."""
        try:
            found = reductions_of(root)
        except UnknownLoss as reason:
            self.unknown = str(reason)
            return []
        calls = []
        for each in found:
            call = LossCall(each.kind, 0, "sum", each.count, self.step(), root.dtype, None, True)

            def take(grads: Any, call: LossCall = call, divisor: float = each.divisor) -> None:
                call.take(grads[0] / divisor)

            each.node.register_prehook(take)
            calls.append(call)
        return calls

    def recorded(self, name: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a loss function that records its calls."""
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            # A mode of torch calls the same function a second time, inside of the first.
            if torch.compiler.is_compiling() or getattr(self.here, "inside", False):
                return plain(*args, **kwargs)
            self.here.inside = True
            try:
                result = plain(*args, **kwargs)
            finally:
                self.here.inside = False
            if self.is_mine() and isinstance(result, Tensor) and result.requires_grad:
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                self.note(name, given.arguments, result)
            return result

        return call

    def note(self, name: str, given: dict[str, Any], result: Tensor) -> None:
        """Record one call, and wait for the gradient of its result."""
        if given.get("reduce") is not None or given.get("size_average") is not None:
            return  # these old arguments replace `reduction`
        prediction, target, reduction = given["input"], given["target"], given["reduction"]
        count = float(result.numel()) if result.ndim else count_targets(name, given)
        if reduction == "batchmean":
            reduction, count = "mean", float(prediction.shape[0])
        shapes = (prediction.shape, target.shape) if name in BY_ELEMENT else None
        classes = 0 if shapes else prediction.shape[-1 if prediction.ndim == 1 else 1]
        call = LossCall(name, classes, reduction, count, self.step(), result.dtype, shapes)
        if name in BY_CLASS and not target.is_floating_point():
            call.has_targets = bool((target != given["ignore_index"]).any())
        result.register_hook(call.take)  # type: ignore[no-untyped-call]
        self.calls.append(call)


def count_targets(name: str, given: dict[str, Any]) -> float:
    """Return how many targets a loss function averages over; with weights of classes, the sum of these."""
    target: Tensor = given["target"]
    if name not in BY_CLASS:
        return float(max(target.numel(), given["input"].numel()))
    if target.is_floating_point():  # probabilities
        return float(target.numel() // target.shape[-1 if target.ndim == 1 else 1])
    counted = target[target != given["ignore_index"]]
    weight = given.get("weight")
    return float(counted.numel() if weight is None else weight.detach()[counted].double().sum())
