"""Compares many ranks with one worker of the same program: the first step and tensor that part, and whose share is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.simulator.replicas import Told


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
        assert parameter.grad is not None
        self.own.setdefault(rank, {})[id(parameter)] = parameter.grad.detach().clone()

    def note_step(self, rank: int, step: int, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
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


def compare(one: Ledger, many: Ledger, tolerance: float) -> Told | None:
    """Where `many` first leaves `one` by more than the tolerance (of a tensor's largest element), or None.

    Only whole tensors can be compared: a rank that holds shards shows them through `probe.same`.
    """
    alone = one.entries.get(0, [])
    for place in range(max(map(len, [alone, *many.entries.values()]), default=0)):
        for rank in sorted(many.entries):
            entries = many.entries[rank]
            if place >= min(len(entries), len(alone)):
                text = f"{len(entries)} steps and probes on rank {rank}, {len(alone)} on one worker"
                return Told("parts from one worker", (rank,), "steps", text)
            found = _parted(alone[place], entries[place], tolerance)
            if found is not None:
                shares = {r: many.entries[r][place] for r in sorted(many.entries) if place < len(many.entries[r])}
                return _blame(alone[place], shares, rank, found)
    return None


def _parted(left: Entry, right: Entry, tolerance: float) -> int | None:
    """The first tensor that parts."""
    for at, (a, b) in enumerate(zip(left.values, right.values, strict=False)):
        if a.shape != b.shape:
            continue
        largest = float(a.abs().max()) if a.numel() else 0.0
        apart = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        if not apart <= tolerance * largest:
            return at
    return None


def _blame(left: Entry, shares: dict[int, Entry], rank: int, at: int) -> Told:
    a, b = left.values[at].double(), shares[rank].values[at].double()
    index = int((a - b).abs().argmax())
    where = f"{left.names[at]}, {left.label}"
    text = f"{where}: {float(b.flatten()[index]):.6g} where one worker has {float(a.flatten()[index]):.6g}"
    weights = _fit(left, shares, rank)
    if weights is not None:
        off = tuple(r for r, (due, given) in weights.items() if abs(due - given) > 1e-3 * abs(due))
        said = ", ".join(f"rank {r} {given:.4g} for {due:.4g}" for r, (due, given) in weights.items() if r in off)
        return Told("weights differ", off or tuple(shares), where, f"{text}; shares are weighed wrongly: {said}")
    return Told("parts from one worker", _owner_of(a, b, tuple(shares)), where, text)


def _fit(left: Entry, shares: dict[int, Entry], rank: int) -> dict[int, tuple[float, float]] | None:
    """The weight that each rank's own gradient has in one worker's, and in the ranks'; None where they do not span both."""
    if not all(entry.own for entry in shares.values()):
        return None
    columns = torch.stack([torch.cat([g.double().flatten() for g in entry.own]) for entry in shares.values()], 1)
    wanted = torch.stack([torch.cat([g.double().flatten() for g in e.values]) for e in (left, shares[rank])], 1)
    if columns.shape[0] < columns.shape[1] or columns.shape[0] != wanted.shape[0]:
        return None
    weights = torch.linalg.lstsq(columns, wanted).solution
    rest = (columns @ weights - wanted).norm(dim=0)
    if bool((rest > 1e-3 * wanted.norm(dim=0)).any()):
        return None
    return {r: (float(due), float(given)) for r, (due, given) in zip(shares, weights.tolist(), strict=True)}


def _owner_of(a: Tensor, b: Tensor, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks whose equal shares of the tensor hold what parted; all, where it is not cut so."""
    if a.numel() % len(ranks):
        return ranks
    wrong = (a - b).abs().flatten() > 1e-6 * a.abs().max()
    return tuple(rank for rank, part in zip(ranks, wrong.chunk(len(ranks)), strict=True) if bool(part.any())) or ranks
