"""Keeps copies of what each rank trains with, step by step, to be compared with another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Entry:
    """One step of an optimizer, or one call of `probe.same`, as a rank saw it; in copies."""

    label: str
    names: tuple[str, ...]
    values: tuple[Tensor, ...]
    own: tuple[Tensor, ...] = ()
    """Gradients as autograd left them, before anyone reduced them."""


@dataclass
class Ledger:
    """Every rank's entries, in its own order."""

    entries: dict[int, list[Entry]] = field(default_factory=dict)
    own: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def note_own(self, rank: int, parameter: Tensor) -> None:
        """Autograd has just added to a gradient."""
        if parameter.grad is not None:
            self.own.setdefault(rank, {})[id(parameter)] = parameter.grad.detach().clone()

    def note_step(
        self, rank: int, step: int, parameters: Sequence[Tensor], names: Sequence[str]
    ) -> None:
        """Before an update: the gradients that it will take, beside the rank's own."""
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
        """A tensor that must not depend on the number of ranks."""
        self.entries.setdefault(rank, []).append(Entry(label, (name,), (tensor.detach().clone(),)))
