"""Records of what each rank trains with: its parameters at the start, and each step of its optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from isobit import bits

LARGEST_KEPT = 1 << 20  # elements; of larger tensors only the digest is kept


@dataclass(frozen=True)
class Start:
    """The parameters of a rank's optimizer before its first step.

    Attributes:
        digests: The digest of each parameter.
        shapes: The dtype and shape of each parameter.
        varied: Whether any parameter is more than a constant.
    """

    digests: tuple[str, ...]
    shapes: tuple[str, ...]
    varied: bool


@dataclass
class Step:
    """One step of a rank's optimizer.

    Attributes:
        gradients: The digest of each gradient.
        infinite: The first parameter whose gradient is not finite.
        summed: Of each gradient, whether an all-reduce summed into it.
        varied: Of each gradient that was summed, whether it is more than a constant.
        poisoned: Whether this rank put a number that is not finite into a sum.
        settings: The numbers of the optimizer's groups, such as the learning rate, in words.
        data: Digests of the batches since the last step.
        masks: Digests of the random state at each dropout since the last step.
        pending: The gradient that is the result of a collective in progress, in words.
        site: The line of the program that made the step.
        values: The digest of each parameter after the step.
        kept: A copy of each parameter after the step, unless it is large.
        habits: A `StepHabits` of `habits.py`.
        done: Whether the update was made.
    """

    parameters: list[Tensor]
    names: tuple[str, ...]
    gradients: tuple[str, ...]
    infinite: int | None
    summed: tuple[bool, ...]
    varied: tuple[bool, ...]
    poisoned: bool
    settings: tuple[tuple[str, str], ...]
    data: tuple[str, ...]
    masks: tuple[str, ...]
    pending: str = ""
    site: str = ""
    values: tuple[str, ...] = ()
    kept: tuple[Tensor | None, ...] = ()
    habits: Any = None
    done: bool = False


def digest(tensor: Tensor | None) -> str:
    """Return the digest of a tensor's bits, or "none"."""
    return "none" if tensor is None else bits.digest(tensor.detach())


def copy_if_small(tensor: Tensor) -> Tensor | None:
    """Return a copy to show later where the tensor differs, or None if it is large."""
    return tensor.detach().clone() if tensor.numel() <= LARGEST_KEPT else None


def describe_difference(left: Tensor | None, right: Tensor | None) -> str:
    """Return in words where two copies first differ."""
    found = None if left is None or right is None else bits.first_difference(left, right)
    if found is None:
        return "somewhere"
    return f"first at {list(found.index or ())}, {found.left} against {found.right}"


def is_constant(tensor: Tensor) -> bool:
    """Return whether all elements have one value, as in new biases and norm weights."""
    flat = tensor.detach().reshape(-1)
    return flat.numel() == 0 or bool((flat == flat[0]).all())


def plain_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that are no shards (DTensor is a class of its own)."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in held if type(p) in (Tensor, nn.Parameter)]


def sharded_parameters(optimizer: Optimizer) -> list[DTensor]:
    """Return the parameters that are shards, as FSDP2 and tensor parallelism make them."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in held if isinstance(p, DTensor)]


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient that this rank holds: of a shard its own part."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        local = gradient._local_tensor
        return local if type(local) is Tensor else None
    return plain_gradient(parameter)


def settings_of(optimizer: Optimizer) -> tuple[tuple[str, str], ...]:
    """Return the numbers of each group of an optimizer, such as ("lr", "0.1")."""
    return tuple(
        (name if at == 0 else f"{name} of group {at}", str(value))
        for at, group in enumerate(optimizer.param_groups)
        for name, value in sorted(group.items())
        if isinstance(value, (bool, int, float, tuple))
        or (isinstance(value, Tensor) and name != "params" and value.numel() == 1)
    )


def plain_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient, dense if it is sparse; None if it is of another tensor class."""
    gradient = parameter.grad
    if type(gradient) is not Tensor:
        return None
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def is_finite(tensor: Tensor | None) -> bool:
    """Return whether a tensor has no NaN and no infinity."""
    if tensor is None or not tensor.is_floating_point():
        return True
    # torch has no isfinite for fp8
    wide = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    return bool(torch.isfinite(wide).all())


# Copies of the gradients of each step, to compare a run on many ranks with a run on one.


@dataclass
class Entry:
    """One step of an optimizer, or one call of `probe.same`, on one rank.

    Attributes:
        label: What this is, in words.
        names: The name of each tensor.
        values: A copy of each tensor.
        own: Each gradient as autograd left it, before any reduction.
    """

    label: str
    names: tuple[str, ...]
    values: tuple[Tensor, ...]
    own: tuple[Tensor, ...] = ()


@dataclass
class StepCopies:
    """The entries of every rank, in the order in which the rank made them."""

    entries: dict[int, list[Entry]] = field(default_factory=dict)
    own: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def note_own(self, rank: int, parameter: Tensor) -> None:
        """Copy a gradient to which autograd has just added."""
        if parameter.grad is not None:
            self.own.setdefault(rank, {})[id(parameter)] = parameter.grad.detach().clone()

    def note_step(
        self, rank: int, step: int, parameters: Sequence[Tensor], names: Sequence[str]
    ) -> None:
        """Copy the gradients before an update, with the rank's own from before the reduction."""
        held = [(i, p) for i, p in enumerate(parameters) if p.grad is not None]
        own = self.own.get(rank, {})
        entry = Entry(
            f"gradients of step {step}",
            tuple(names[i] for i, _ in held),
            tuple(p.grad.detach().clone() for _, p in held if p.grad is not None),
            tuple(own[id(p)] for _, p in held) if all(id(p) in own for _, p in held) else (),
        )
        self.entries.setdefault(rank, []).append(entry)

    def note(self, rank: int, label: str, name: str, tensor: Tensor) -> None:
        """Copy a tensor that must not depend on the number of ranks."""
        self.entries.setdefault(rank, []).append(Entry(label, (name,), (tensor.detach().clone(),)))
