"""Compares many ranks with one worker of the same program: the first step and tensor that part, and whose share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.simulator.checkers.step_copies import Entry, Ledger
from isobit.simulator.checkers.training_errors import Told, as_error
from isobit.simulator.checkers.verdict import Result
from isobit.simulator.world import World


def compare_with_one(
    world: World,
    function: Callable[..., Any],
    *args: Any,
    init: bool = True,
    tolerance: float = 1e-4,
) -> Result:
    """Runs the function in the world and on one rank; the result of the former, or what is wrong with either.

    The function must make the same global batch whatever the number of ranks.
    """
    one = World(
        1,
        world.seed,
        delays=world.delays,
        watch=("training",),
        poison=world.poison,
        sends=world.sends,
        patience=world.patience,
    )
    if "training" not in world.watch_for:
        raise ArgumentError(
            expected="a world that watches training",
            received=f"watch {world.watch_for}",
            remedy='watch=("training",)',
        )
    alone, many = one.ledger, world.ledger = Ledger(), Ledger()
    one.ignore = world.ignore
    try:
        result = world.run(function, *args, init=init)
        one.run(function, *args, init=init)
    finally:
        world.ledger = None  # a later run of this world keeps no copies
    if not count_alike(alone, many):
        raise ArgumentError(
            expected="an optimizer's step, or a call of probe.same, with whole tensors on one rank and on many",
            received="none, so there is nothing to compare",
            remedy="show what ranks hold in parts through isobit.simulator.probe.same",
        )
    told = compare(alone, many, tolerance)
    if told is not None:
        error = as_error(told)
        error.result = result
        result.findings.append(error)
        if world.strict:
            raise error
    return result


def count_alike(one: Ledger, many: Ledger) -> int:
    """Tensors that both have, of one shape."""
    pairs = [
        pair
        for entries in many.entries.values()
        for pair in zip(one.entries.get(0, []), entries, strict=False)
    ]
    return sum(
        a.shape == b.shape
        for left, right in pairs
        for a, b in zip(left.values, right.values, strict=False)
    )


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
                shares = {
                    r: many.entries[r][place]
                    for r in sorted(many.entries)
                    if place < len(many.entries[r])
                }
                return _blame(alone[place], shares, rank, found)
    return None


def _parted(left: Entry, right: Entry, tolerance: float) -> int | None:
    """The first tensor that parts."""
    for at, (a, b) in enumerate(zip(left.values, right.values, strict=False)):
        if a.shape != b.shape:
            continue
        largest = float(a.double().abs().max()) if a.numel() else 0.0
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
        said = ", ".join(
            f"rank {r} {given:.4g} for {due:.4g}" for r, (due, given) in weights.items() if r in off
        )
        return Told(
            "weights differ",
            off or tuple(shares),
            where,
            f"{text}; shares are weighed wrongly: {said}",
        )
    return Told("parts from one worker", _owner_of(a, b, tuple(shares)), where, text)


def _fit(left: Entry, shares: dict[int, Entry], rank: int) -> dict[int, tuple[float, float]] | None:
    """The weight of each rank's own gradient in one worker's and in the ranks'; None where they do not span both."""
    if not all(entry.own for entry in shares.values()):
        return None
    columns = torch.stack(
        [torch.cat([g.double().flatten() for g in entry.own]) for entry in shares.values()], 1
    )
    wanted = torch.stack(
        [torch.cat([g.double().flatten() for g in e.values]) for e in (left, shares[rank])], 1
    )
    if columns.shape[0] < columns.shape[1] or columns.shape[0] != wanted.shape[0]:
        return None
    weights = torch.linalg.lstsq(columns, wanted).solution
    rest = (columns @ weights - wanted).norm(dim=0)
    if bool((rest > 1e-3 * wanted.norm(dim=0)).any()):
        return None
    return {
        r: (float(due), float(given))
        for r, (due, given) in zip(shares, weights.tolist(), strict=True)
    }


def _owner_of(a: Tensor, b: Tensor, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks whose equal shares of the tensor hold what parted; all, where it is not cut so."""
    if a.numel() % len(ranks):
        return ranks
    wrong = (a - b).abs().flatten() > 1e-6 * a.abs().max()
    return (
        tuple(
            rank
            for rank, part in zip(ranks, wrong.chunk(len(ranks)), strict=True)
            if bool(part.any())
        )
        or ranks
    )
