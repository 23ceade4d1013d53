"""Copies of the gradients of each step, to compare a run on many ranks with a run on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


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
