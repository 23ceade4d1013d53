"""Comparison with one rank: the first step and tensor where many ranks differ from one, and whose share is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.simulator.checkers.step_record import Entry, StepCopies
from isobit.simulator.execution import execute
from isobit.simulator.findings import TrainingFinding, as_error
from isobit.simulator.result import Result
from isobit.simulator.world import World


def compare_with_one(
    world: World,
    function: Callable[..., Any],
    *args: Any,
    init: bool = True,
    tolerance: float = 1e-4,
) -> Result:
    """Run a program on the ranks of a world and on one rank, and compare its gradients and probes.

    Replicas may agree on wrong numbers: a mean of means over unequal shares, a gradient that is reduced twice. Only
    one rank shows that. If gradients differ, they are fitted by the ranks' own gradients, to find the ranks whose
    share has a wrong weight.

    Args:
        world: The ranks. It must watch "training".
        function: Called as `function(rank, *args)`. It must make the same global batch for any number of ranks.
        *args: Its arguments after the rank.
        init: As in `World.run`.
        tolerance: The largest difference of an element, relative to the largest element of its tensor.

    Returns:
        The result of the run on many ranks.

    Raises:
        TrainingError: If they differ; `kind` is "weights differ" or "differs from one worker".
        SimulationError: If either run fails.
        ArgumentError: If the world does not watch training, or there is nothing to compare.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from isobit.simulator import World, compare_with_one
        >>> def program(rank):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     x = torch.arange(8.0).reshape(4, 2).chunk(dist.get_world_size())[rank]
        ...     model(x).sum().backward()
        ...     dist.all_reduce(model.weight.grad)
        ...     torch.optim.SGD(model.parameters()).step()
        >>> compare_with_one(World(2, watch=("training",)), program).findings
        []
    """
    settings = world.settings
    if "training" not in settings.watch:
        raise ArgumentError(
            expected='a world with "training" in watch',
            received=f"watch={settings.watch}",
            remedy='pass watch=("training",) to World',
        )
    alone, many = StepCopies(), StepCopies()
    result = execute(settings, function, args, init, copies=many)
    single = replace(settings, ranks=1, faults=(), watch=("training",), strict=True)
    execute(single, function, args, init, copies=alone)
    if not count_comparable(alone, many):
        raise ArgumentError(
            expected="an optimizer's step, or a call of probe.same, with whole tensors on one rank and on many",
            received="none, so there is nothing to compare",
            remedy="pass sharded tensors, gathered, to isobit.simulator.probe.same",
        )
    finding = compare(alone, many, tolerance)
    if finding is not None:
        error = as_error(finding)
        error.result = result
        result.findings.append(error)
        if settings.strict:
            raise error
    return result


def count_comparable(one: StepCopies, many: StepCopies) -> int:
    """Count the tensors that both have with the same shape."""
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


def compare(one: StepCopies, many: StepCopies, tolerance: float) -> TrainingFinding | None:
    """Find the first tensor of `many` that differs from `one` by more than the tolerance.

    Only tensors of the same shape are compared: shards are not.
    """
    alone = one.entries.get(0, [])
    for place in range(max(map(len, [alone, *many.entries.values()]), default=0)):
        for rank in sorted(many.entries):
            entries = many.entries[rank]
            if place >= min(len(entries), len(alone)):
                text = f"{len(entries)} steps and probes on rank {rank}, {len(alone)} on one worker"
                return TrainingFinding("differs from one worker", (rank,), text)
            found = _first_different(alone[place], entries[place], tolerance)
            if found is not None:
                shares = {
                    r: many.entries[r][place]
                    for r in sorted(many.entries)
                    if place < len(many.entries[r])
                }
                return _blame(alone[place], shares, rank, found)
    return None


def _first_different(left: Entry, right: Entry, tolerance: float) -> int | None:
    for at, (a, b) in enumerate(zip(left.values, right.values, strict=False)):
        if a.shape != b.shape:
            continue
        largest = float(a.double().abs().max()) if a.numel() else 0.0
        apart = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        if not apart <= tolerance * largest:
            return at
    return None


def _blame(left: Entry, shares: dict[int, Entry], rank: int, at: int) -> TrainingFinding:
    a, b = left.values[at].double(), shares[rank].values[at].double()
    index = int((a - b).abs().argmax())
    values = f"{float(b.flatten()[index]):.6g} where one worker has {float(a.flatten()[index]):.6g}"
    text = f"{left.names[at]}, {left.label}: {values}"
    weights = _fit(left, shares, rank)
    if weights is not None:
        off = tuple(r for r, (due, given) in weights.items() if abs(due - given) > 1e-3 * abs(due))
        wrong = ", ".join(
            f"rank {r} {given:.4g} instead of {due:.4g}"
            for r, (due, given) in weights.items()
            if r in off
        )
        text = f"{text}; wrong weights of shares: {wrong}"
        return TrainingFinding("weights differ", off or tuple(shares), text)
    return TrainingFinding("differs from one worker", _owners(a, b, tuple(shares)), text)


def _fit(left: Entry, shares: dict[int, Entry], rank: int) -> dict[int, tuple[float, float]] | None:
    """Fit the gradient of one rank and of many by the ranks' own gradients; None if they do not span both.

    Returns:
        By rank, the weight of its gradient on one rank and on many.
    """
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


def _owners(a: Tensor, b: Tensor, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks whose equal shares of the tensor differ; all ranks if it has no equal shares."""
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
