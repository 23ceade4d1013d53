"""Compare the gradients of one batch, cut into different numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from isobit.errors import ArgumentError

MOST_ELEMENTS = 2**18  # of a gradient that are used to find weights
FIT = 1e-3  # of a gradient that weights of the micro-batches leave unexplained

LossFunction = Callable[[nn.Module, Any, tuple[Any, ...]], Tensor]


@dataclass(frozen=True)
class SplitResult:
    """The gradient of a batch in a number of micro-batches, compared with that of the whole batch.

    Attributes:
        micro_batches: Their number.
        difference: The largest difference of an element, relative to the largest element of the whole gradient.
        is_equal: Whether that is within the tolerance.
        found: The weight that each micro-batch's own gradient has in the sum; empty if weights explain nothing.
        expected: The weights that give the gradient of the whole batch; empty if none do, so that the model or the
            loss mixes samples.

    Example:
        >>> from isobit.guards import SplitResult
        >>> SplitResult(2, 0.0, True).is_equal
        True
    """

    micro_batches: int
    difference: float
    is_equal: bool
    found: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Return the result in words."""
        if self.is_equal:
            return f"{self.micro_batches} micro-batches: equal within {self.difference:.3g}"
        if not self.expected:
            return (
                f"{self.micro_batches} micro-batches: {self.difference:.3g} apart, and no weighted sum: "
                "the model or the loss mixes samples"
            )
        found, due = (", ".join(f"{w:.4g}" for w in each) for each in (self.found, self.expected))
        return f"{self.micro_batches} micro-batches: weights {found} instead of {due}"


def micro_batch_invariance(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    splits: Sequence[int] = (2, 8),
    *,
    tolerance: float = 1e-3,
) -> tuple[SplitResult, ...]:
    """Compare the gradient of a batch with the sum over its micro-batches, as a training loop accumulates it.

    Samples of unequal lengths are what shows a wrong normaliser: give the batch such samples, padded.

    Args:
        model: The model, in the mode to test; its gradients are put back. Dropout must be off.
        loss_fn: Called as `loss_fn(model, part, parts)`: returns the loss of `part`, one of the tuple `parts`, as the
            training loop calls backward on it, with everything that it divides by.
        batch: A tensor, or a dictionary, list or tuple of tensors, whose first dimension is the sample.
        splits: Numbers of micro-batches, each from 2 to the number of samples.
        tolerance: The largest difference, relative to the largest element: sums in another order round differently.

    Returns:
        A result per number of micro-batches.

    Raises:
        ArgumentError: If the batch cannot be cut so, the loss is random, or the gradient is zero or not finite.

    Example:
        >>> from isobit.guards import micro_batch_invariance
        >>> x = torch.arange(1.0, 9.0).reshape(4, 2)
        >>> batch = {"x": x, "mask": torch.tensor([[1, 0], [1, 1], [1, 1], [1, 1]])}
        >>> model = torch.nn.Linear(1, 1)
        >>> def mean_of_means(model, part, parts):
        ...     loss = model(part["x"][..., None])[..., 0] * part["mask"]
        ...     return loss.sum() / part["mask"].sum() / len(parts)
        >>> print(micro_batch_invariance(model, mean_of_means, batch, splits=[2])[0])
        2 micro-batches: weights 0.5, 0.5 instead of 0.4286, 0.5714
    """
    leaves, shape = tree_flatten(batch)
    rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    if len(rows) != 1 or not splits or not all(2 <= count <= min(rows) for count in splits):
        raise ArgumentError(
            expected="tensors with one number of samples, and at least one split from 2 to that number",
            received=f"samples {sorted(rows)}, splits {list(splits)}",
            remedy="stack the samples along the first dimension; 8 samples are 2 × 4 and 8 × 1",
        )
    kept = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    try:
        whole = Gradient(model, loss_fn, (batch,))
        again = Gradient(model, loss_fn, (batch,))
        check_gradient(whole, again)
        return tuple(
            compare(whole, model, loss_fn, cut(leaves, shape, count), tolerance) for count in splits
        )
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def cut(leaves: list[Any], shape: Any, count: int) -> tuple[Any, ...]:
    """Cut every tensor of a batch into `count` parts along its first dimension."""
    pieces = [
        torch.tensor_split(leaf, count)
        if isinstance(leaf, Tensor) and leaf.ndim
        else [leaf] * count
        for leaf in leaves
    ]
    return tuple(tree_unflatten([piece[at] for piece in pieces], shape) for at in range(count))


class Gradient:
    """The gradient of the sum of the losses of some micro-batches."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, parts: tuple[Any, ...]) -> None:
        """Run forward and backward of every part."""
        trained = [p for p in model.parameters() if p.requires_grad]
        self.stride = sum(p.numel() for p in trained) // MOST_ELEMENTS + 1
        for parameter in trained:
            parameter.grad = None
        for part in parts:
            loss_fn(model, part, parts).backward()  # type: ignore[no-untyped-call]
        self.sample = self.sampled(trained)
        self.values = [None if p.grad is None else p.grad.detach().clone() for p in trained]
        for parameter in trained:
            parameter.grad = None

    def sampled(self, trained: list[nn.Parameter]) -> Tensor:
        """Return every `stride`-th element of all gradients."""
        given = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        parts = [grad.detach().to_dense().flatten()[:: self.stride].double() for grad in given]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def difference(self, other: Gradient) -> float:
        """Return the largest difference of an element, relative to this gradient's largest."""
        pairs = zip(self.values, other.values, strict=True)
        apart = [
            0.0 if a is None and b is None else largest(a) if b is None else largest_apart(b, a)
            for a, b in pairs
        ]
        return max(apart) / max(map(largest, self.values))


def largest(value: Tensor | None) -> float:
    """Return the largest magnitude of a gradient."""
    if value is None or not value.numel():
        return 0.0
    return float(value.to_dense().double().abs().max())


def largest_apart(value: Tensor, other: Tensor | None) -> float:
    """Return the largest difference of two gradients."""
    return largest(value if other is None else value.to_dense() - other.to_dense())


def check_gradient(whole: Gradient, again: Gradient) -> None:
    """Raise unless the gradient of the whole batch is a number that a second run gives again."""
    size = max(map(largest, whole.values), default=0.0)
    if not 0 < size < float("inf"):
        raise ArgumentError(
            expected="a gradient of the whole batch that is finite and not zero",
            received=f"largest element {size:g} of {len(whole.values)} parameters",
            remedy="pass a loss that depends on the model's trainable parameters",
        )
    if whole.difference(again) != 0:
        raise ArgumentError(
            expected="a loss that is the same when it is computed again",
            received=f"gradients that differ by {whole.difference(again):.3g}",
            remedy="call model.eval(), or set dropout to 0: its masks follow the micro-batches",
        )


def compare(
    whole: Gradient, model: nn.Module, loss_fn: LossFunction, parts: tuple[Any, ...], near: float
) -> SplitResult:
    """Compare the whole batch's gradient with that of its parts, and find the weights of the parts."""
    given = Gradient(model, loss_fn, parts)
    apart = whole.difference(given)
    if apart <= near:
        return SplitResult(len(parts), apart, True)
    alone = torch.stack([Gradient(model, loss_fn, (part,)).sample for part in parts], 1)
    found = weights_of(alone, given.sample)
    expected = weights_of(alone, whole.sample)
    if found is None or expected is None:
        return SplitResult(len(parts), apart, False)
    return SplitResult(len(parts), apart, False, found, expected)


def weights_of(columns: Tensor, total: Tensor) -> tuple[float, ...] | None:
    """Return the weights with which columns add up to a vector; None if there are none, or many."""
    if columns.shape[0] < columns.shape[1]:
        return None
    if int(torch.linalg.matrix_rank(columns)) < columns.shape[1]:
        return None
    weights = torch.linalg.lstsq(columns, total[:, None]).solution
    if float((columns @ weights - total[:, None]).norm()) > FIT * float(total.norm()):
        return None
    return tuple(weights[:, 0].tolist())
